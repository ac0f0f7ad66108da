"""Classify texts: python infer.py TEXT ..., or in Python: from infer import predict."""

import json, pathlib, sys, unicodedata, numpy as np, onnxruntime

session = onnxruntime.InferenceSession(pathlib.Path(__file__).with_name("whole.onnx"))
facts = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}
numbers = {piece: number for number, piece in enumerate(facts["vocabulary"])}
CJK = (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2CEAF), (0x2F800, 0x2FA1F)

def words(text):  # as BERT's authors split them
    text = text.lower() if facts["lower"] else text
    text = unicodedata.normalize("NFD", text) if facts["strip_accents"] else text
    for letter in text:
        kind, cjk = unicodedata.category(letter), any(a <= ord(letter) <= b for a, b in CJK)
        is_mark = kind[0] == "P" or "!" <= letter <= "~" and not letter.isalnum() or cjk
        gone = letter in "\0\ufffd" or kind[0] == "C" or kind == "Mn" and facts["strip_accents"]
        is_space = letter in "\t\n\r" or kind == "Zs"
        yield " " if is_space else "" if gone else f" {letter} " if is_mark else letter

def pieces(word):  # the longest known ones from the left
    answer, rest = [], word
    ends = lambda: (e for e in range(len(rest), 2 * bool(answer), -1) if rest[:e] in numbers)
    while rest and len(word) <= 100 and (end := next(ends(), 0)):
        answer, rest = [*answer, numbers[rest[:end]]], rest[end:] and "##" + rest[end:]
    return [numbers["[UNK]"]] if rest else answer

def predict(texts):  # per text (of pairs with a tab in between) its probabilities or score
    rows, encode = [], lambda text: [p for w in "".join(words(text)).split() for p in pieces(w)]
    for parts in ([*map(encode, text.split("\t"))] for text in texts):
        while sum(map(len, parts)) > facts["max_tokens"] - len(parts) - 1:
            max(parts[::-1], key=len).pop()
        rows.append([(p, k, True) for k, part in enumerate(parts) for p in [*part, numbers["[SEP]"]]])
        rows[-1].insert(0, (numbers["[CLS]"], 0, True))
    padded = np.array([row + [(0, 0, False)] * (max(map(len, rows)) - len(row)) for row in rows])
    feed = {"tokens": padded[..., 0], "segments": padded[..., 1], "mask": padded[..., 2] > 0}
    answers = session.run(["probabilities"], feed)[0]
    return [dict(zip(facts["classes"], row)) or float(row[0]) for row in answers.tolist()]

if __name__ == "__main__":
    print(json.dumps(dict(zip(sys.argv[1:], predict(sys.argv[1:]))), indent=1))
