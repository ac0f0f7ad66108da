"""Predict with a run folder of any task."""

from tasks import load

detector = load("outputs/detection/swin_t_afbo/latest")  # device="cuda" for a GPU
answers = detector.predict("photo.jpg")  # or images, arrays, tensors, a list of them, a folder
print(answers)
# [{"input": "photo.jpg", "image_id": 0, "detections": [{"bbox": [...], "score": 0.97, ...}, ...]}]
