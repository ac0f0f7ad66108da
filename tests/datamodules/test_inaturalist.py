"""iNaturalist 2019: labels by the json's category ids, and wrong json files."""

import json

import pytest

from datamodules import INaturalist2019DataModule
from tests.datamodules import loading
from tests.stand_ins import write_inaturalist

module, ready, rejected, not_found = loading.bound(
    INaturalist2019DataModule, num_classes=None, image_size=32, batch_size=3, num_workers=0
)


@pytest.fixture
def root(tmp_path):
    write_inaturalist(tmp_path)
    return tmp_path


def change(root, split, edit):
    path = root / f"{split}2019.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return content


def test_labels_follow_the_category_ids(root):
    data = ready(root)
    assert data.category_ids == (2, 7, 10)
    assert data.class_names == ("Aves bubo", "Plantae abies", "Insecta apis")
    for split in ("train", "val"):
        dataset = data.dataset(split)
        assert len(dataset) == 6
        for index in range(6):
            label = int(dataset[0, index]["label"])
            assert f"/{data.category_ids[label]}/" in dataset.describe(index)
    assert len(list(data.train_dataloader())) == 2


def test_ids_may_be_floats_and_shared_images_are_logged(root):
    def floats(content):
        for kind in ("images", "categories", "annotations"):
            for one in content[kind]:
                one |= {key: float(one[key]) for key in one if key.endswith("id")}

    train = change(root, "train", floats)
    data = ready(root)
    assert repr(data.category_ids) == "(2, 7, 10)"
    assert not data.notices({})
    shared = train["images"][3]["file_name"]
    change(root, "val", lambda content: content["images"][0].update(file_name=shared))
    (line,) = ready(root).notices({})
    assert line.startswith("1 of 6 validation images are also training images")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("annotations"), "the content lacks 'annotations'"),
        (lambda c: c["annotations"].pop(), "one annotation of a known category: 1071"),
        (lambda c: c["annotations"].append(c["annotations"][0]), "known category: 1020"),
        (lambda c: c["annotations"][0].update(category_id=3), "known category: 1020"),
        (lambda c: c["categories"][0].update(name="Aves strix"), "have different categories"),
        (lambda c: c["images"][0].update(file_name="../x.jpg"), "outside its folder"),
        (lambda c: c["images"][1].update(id="7"), r'json: images\[1\]: id must .* got "7"$'),
        (lambda c: c["categories"][2].update(id=7.5), r"categories\[2\]: id must .* got 7\.5$"),
        (lambda c: c["annotations"][3].update(image_id=True), r"\[3\]: image_id must .* True$"),
        (lambda c: c["annotations"][0].update(category_id="2"), r'\[0\]: category_id .* got "2"$'),
        (lambda c: c["images"].append(c["images"][0]), "duplicate ids of images: 1020"),
        (lambda c: c["categories"].append(c["categories"][0]), "duplicate ids of categories: 2"),
        (lambda c: c["images"][1].update(file_name=f"./{c['images'][0]['file_name']}"),
         r"the same file under two image ids: train_val2019/Some/2/1020\.jpg"),
    ],
)  # fmt: skip
def test_faults_of_the_json_are_rejected(root, edit, message):
    change(root, "val", edit)
    rejected(root, message)
