"""A number from a signal."""

from tasks.engine.family import Counted, Family, Metric

FAMILY = Family(
    name="toy",
    task="tasks.toy.task.NumberTask",
    modality="signal",
    unit="signals",
    batch={"signal": "(B, C, L)", "number": "(B,)"},
    metrics=(Metric("mae", "mean absolute error", direction="min"),),
    monitor="mae",
    counted=Counted({}, head="number", shape=(1, 64)),
)
