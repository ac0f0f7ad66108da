"""Train, test and predict from a notebook: a command takes its words as a list."""

# %% Train on sample data
from tools import run

run.main(
    [
        "task=classification",
        "backbone=deit_t_afbo",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=4",
        "trainer.limit_val_batches=2",
        "output_dir=notebook_outputs",
    ]
)

# %% Predict
from PIL import Image

from tasks import load

classifier = load("notebook_outputs/classification/deit_t_afbo/latest")
print(classifier.predict(Image.new("RGB", (64, 64))))
