"""COCO's precisions by pycocotools, for comparisons with ours."""


def evaluate_coco(annotations, detections, kind, images=None, categories=None):
    """Return COCO's six precisions, for all images and categories by default."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = COCO(str(annotations))
    evaluation = COCOeval(truth, truth.loadRes(detections), kind)
    evaluation.params.imgIds = images or evaluation.params.imgIds
    evaluation.params.catIds = categories or evaluation.params.catIds
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats[:6]
