"""Train, test and predict from a notebook, with the command's own options."""

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
