"""Forecasting of multivariate time series."""

from tasks.engine.family import Counted, Family, Metric, Published

FAMILY = Family(
    name="forecasting",
    task="tasks.forecasting.task.ForecastingTask",
    modality="series",
    hub_task="time-series-forecasting",
    unit="windows",
    batch={"series": "(B, L, M)", "future": "(B, T, V)"},
    exact_inputs=True,
    targets=("variables",),
    metrics=(
        Metric("mse", "mean squared error", direction="min", published="mse"),
        Metric("mae", "mean absolute error", direction="min", published="mae"),
        Metric("pinball", "pinball loss", direction="min"),
        Metric("coverage", "share of values between the outer quantiles"),
    ),
    monitor="mse",
    answers="mse",
    counted=Counted({"horizon": 96, "targets": 7}, head="forecaster", shape=(96, 7)),
    exports={"onnx": "model", "torch_export": "model"},
    whole_graph="tasks.forecasting.whole.WholeForecaster",
    graph="tasks.forecasting.graph.describe_graph",
    analyses={
        "report": "",
        "mappings": "",
        "landscape": "task_objective",
    },
    averaged="data.horizon",
    averaged_values=(96, 192, 336, 720),
    channels_first=False,
    published=Published(
        "datamodules.series.benchmarks.ETTh1DataModule",
        2785,
        also={
            name: (f"datamodules.series.benchmarks.{kind}DataModule", count)
            for name, kind, count in (
                ("weather", "Weather", 5175),
                ("ecl", "ECL", 2537),
                ("traffic", "Traffic", 1661),
                ("exchange", "Exchange", 665),
            )
        },
        fixed_parameters=False,
    ),
)
