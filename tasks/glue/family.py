"""Understanding of language: the sets of GLUE, and pretraining on text."""

from tasks.engine.family import Counted, Family, Metric, Published

# The metrics of GLUE's sets, in percent; ``score`` is the mean of a set's own.
METRICS = {
    "accuracy": "accuracy in %",
    "f1": "F1 in %",
    "matthews": "Matthews correlation in %",
    "pearson": "Pearson correlation in %",
    "spearman": "Spearman correlation in %",
    "words": "accuracy of predicted words in %",
}

FAMILY = Family(
    name="glue",
    task="tasks.glue.task.GlueTask",
    modality="text",
    prompt="a text per line; a tab separates the two of a pair",
    hub_task="text-classification",
    unit="texts",
    batch={
        "tokens": "(B, L)", "segments": "(B, L)", "mask": "(B, L)",
    },
    exact_inputs=True,
    targets=("classes",),
    metrics=(
        Metric("score", "GLUE's score in %", published="glue", lowest=-100.0),
        *(
            Metric(name, title, lowest=-100.0 if "correlation" in title else 0.0)
            for name, title in METRICS.items()
        ),
        Metric("mismatched", "accuracy on mismatched MNLI in %"),
    ),
    monitor="score",
    answers="accuracy",
    counted=Counted(
        {"num_classes": 2}, head="text_classifier", shape=(128,),
        inputs="tasks.glue.inputs.first_words",
    ),
    exports={"onnx": "model", "torch_export": "model"},
    whole_graph="tasks.glue.whole.WholeTexts",
    graph="tasks.glue.graph.describe_graph",
    analyses={"report": "", "mappings": ""},
    channels_first=False,
    published=Published(
        "datamodules.text.glue.GlueDataModule", 1043, fixed_parameters=False,
        incomparable="the paper gives neither its settings nor its pretraining",
    ),
)  # fmt: skip
