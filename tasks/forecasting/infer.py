"""Forecast series: python infer.py TABLE.csv ..., or in Python: from infer import predict."""

import csv, json, pathlib, sys, numpy as np, onnxruntime

session = onnxruntime.InferenceSession(pathlib.Path(__file__).with_name("whole.onnx"))
facts = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}

def values(table):  # of a csv file with names in its first line, or an array: the look-back (L, M)
    if not isinstance(table, np.ndarray):
        with open(table, newline="", encoding="utf-8-sig") as file:
            kind = csv.Sniffer().sniff(file.readline(), ",;\t")
            file.seek(0)
            rows = list(csv.DictReader(file, dialect=kind))[-facts["lookback"] :]
        table = np.array([[float(row[name]) for name in facts["names"]] for row in rows])
    table = table[-facts["lookback"] :].astype(float)
    if len(table) < facts["lookback"] or not np.isfinite(table).all():
        raise ValueError(f"a series needs {facts['lookback']} rows without gaps")
    return table

def predict(tables):  # (horizon, targets) per table, and (horizon, targets, Q) with quantiles
    series = np.stack([values(table) for table in tables])
    return list(session.run(["forecast"], {"series": series})[0])

if __name__ == "__main__":
    for name, rows in zip(sys.argv[1:], predict(sys.argv[1:])):
        print(name, facts["names"][: facts["targets"]], facts["quantiles"], *rows.tolist(), sep="\n")
