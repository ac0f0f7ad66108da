"""Small sets in GLUE's own files."""

from datamodules.text.glue import SETS

HEADERS = {
    "CoLA": None,
    "SST-2": "sentence\tlabel",
    "MRPC": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "STS-B": "index\tgenre\tsentence1\tsentence2\tscore",
    "QQP": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    "MNLI": "index\tpromptID\tsentence1\tsentence2\tlabel1\tgold_label",
    "QNLI": "index\tquestion\tsentence\tlabel",
    "RTE": "index\tsentence1\tsentence2\tlabel",
    "WNLI": "index\tsentence1\tsentence2\tlabel",
}
TESTS = {
    "CoLA": "index\tsentence", "SST-2": "index\tsentence",
    "MRPC": "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "STS-B": "index\tgenre\tsentence1\tsentence2", "QQP": "id\tquestion1\tquestion2",
    "MNLI": "index\tpromptID\tsentence1\tsentence2", "QNLI": "index\tquestion\tsentence",
    "RTE": "index\tsentence1\tsentence2", "WNLI": "index\tsentence1\tsentence2",
}  # fmt: skip
WORDS = ("dog", "cat", "runs", "sees", "the", "a", 'the "big', "one,")


def line(folder, header, index, label):
    """A line of a set with texts of its own."""
    words = [f"{WORDS[(index + step) % 8]} {WORDS[(3 * index + step) % 8]}" for step in (0, 1)]
    if folder == "CoLA" and header is None:
        return f"gj04\t{label}\t\t{words[0]}"
    texts = iter(words)
    values = {"label": label, "Quality": label, "score": label, "is_duplicate": label,
              "gold_label": label}  # fmt: skip
    cells = []
    for name in header.split("\t"):
        is_text = name.startswith(("sentence", "question")) or name.endswith("String")
        cells.append(next(texts) if is_text else str(values.get(name, index)))
    return "\t".join(cells)


def write_sets(folder, count=2, names=tuple(SETS)):
    """Each set in its published columns, with ``count`` examples and test files."""
    for kind in (SETS[name] for name in names):
        inner = folder / kind.folder
        inner.mkdir()
        header, tests = HEADERS[kind.folder], TESTS[kind.folder]
        labels = kind.classes or ("4.5", "0.000", "2.2")
        lines = [line(kind.folder, header, i, labels[i % len(labels)]) for i in range(count)]
        if kind.folder == "QQP":
            lines.append("2\tbroken")
        if kind.folder == "MNLI":
            lines.append(line(kind.folder, header, count, "-"))
        text = "\n".join([*([header] if header else []), *lines]) + "\n"
        for name in ("train", *kind.dev):
            (inner / f"{name}.tsv").write_text(text)
        lines = [line(kind.folder, tests, i, "") for i in range(3)]
        for name in (*kind.dev, *(("diagnostic",) if kind.folder == "MNLI" else ())):
            file = inner / f"{name.replace('dev', 'test')}.tsv"
            file.write_text("\n".join([tests, *lines]) + "\n")
