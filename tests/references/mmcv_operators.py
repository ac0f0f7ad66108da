"""What mmcv's compiled operators and detectors built on them gave, on inputs made here.

The values were recorded with onedl-mmcv 2.3.6 compiled for torch 2.12.1 (CPU). An mmcv that has its
compiled operators records them anew:

    PYTHONPATH=. python tests/references/mmcv_operators.py
"""

import itertools
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

RECORDED = Path(__file__).with_suffix(".safetensors")

# RandomState's stream is frozen: other versions of numpy and torch make the same inputs.
FLOATS = {"float32": torch.float32, "float64": torch.float64}


def random(name):
    return np.random.RandomState(zlib.crc32(name.encode()))


def normal(rng, *shape, dtype=torch.float32):
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def boxes(rng, count, extent=60.0, dtype=torch.float32):
    """Boxes in clusters, so that many overlap."""
    centres = rng.uniform(0, extent, (max(1, count // 6), 2))[
        rng.randint(0, max(1, count // 6), count)
    ]
    centres = centres + rng.normal(0, 3, (count, 2))
    sides = rng.uniform(4, 25, (count, 2))
    return torch.from_numpy(np.concatenate([centres - sides / 2, centres + sides / 2], 1)).to(dtype)


def suppression(rng, count, ties):
    found = boxes(rng, count)
    scores = torch.from_numpy(rng.uniform(0, 1, count)).float()
    if ties:  # of scores, and of whole boxes
        scores = (scores * 5).round() / 5
        found[count // 2 :] = found[: count - count // 2]
    return found, scores


def kept(scores, answer):
    """With the order of equal scores, which may be another one in another version of torch."""
    detections, indices = answer
    order = scores.sort(0, descending=True)[1]
    return {"detections": detections, "indices": indices, "order": order}


def nms_cases():
    from mmcv.ops import batched_nms, nms, nms_match, soft_nms

    for count, ties, offset, threshold in itertools.product(
        (0, 1, 80), (False, True), (0, 1), (0.3, 0.6)
    ):
        name = f"nms/{count}-{ties}-{offset}-{threshold}"
        found, scores = suppression(random(name), count, ties)
        yield name, kept(scores, nms(found, scores, threshold, offset=offset))
    found, scores = suppression(random("nms/limits"), 80, ties=True)
    yield "nms/limits", kept(scores, nms(found, scores, 0.5, score_threshold=0.3, max_num=7))
    for method, ties, offset in itertools.product(
        ("naive", "linear", "gaussian"), (False, True), (0, 1)
    ):
        name = f"soft_nms/{method}-{ties}-{offset}"
        found, scores = suppression(random(name), 70, ties)
        yield name, kept(scores, soft_nms(found, scores, 0.4, 0.5, 0.05, method, offset))
    for kind, agnostic, split in itertools.product(("nms", "soft_nms"), (False, True), (10, 9999)):
        name = f"batched_nms/{kind}-{agnostic}-{split}"
        found, scores = suppression(random(name), 80, ties=False)
        classes = torch.from_numpy(random(name).randint(0, 3, 80))
        config = {"type": kind, "iou_threshold": 0.5, "split_thr": split}
        answer = batched_nms(found, scores, classes, config, class_agnostic=agnostic)
        yield name, kept(scores, answer)
    for ties in (False, True):
        found, scores = suppression(random(f"nms_match/{ties}"), 60, ties)
        groups = nms_match(torch.cat([found, scores[:, None]], 1), 0.5)
        sizes = torch.tensor([len(group) for group in groups])
        yield f"nms_match/{ties}", kept(scores, (sizes, torch.cat(groups)))


def roi_cases():
    from mmcv.ops import RoIAlign

    usual = {"size": (7, 7), "scale": 0.25, "ratio": 0, "aligned": True}
    variants = [
        {"aligned": aligned, "ratio": ratio}
        for aligned, ratio in itertools.product((True, False), (0, 1, 3))
    ]
    variants += [
        {"size": (1, 3)},
        {"scale": 1 / 16},
        {"scale": 1.0, "size": (5, 2)},
        {"none": True},
    ]
    for (kind, dtype), variant in itertools.product(FLOATS.items(), variants):
        case = usual | variant
        name = f"roi_align/{kind}-" + "-".join(f"{k}={v}" for k, v in sorted(variant.items()))
        rng = random(name)
        maps = normal(rng, 2, 3, 17, 23, dtype=dtype).requires_grad_()
        layer = RoIAlign(case["size"], case["scale"], case["ratio"], aligned=case["aligned"])
        pooled = layer(maps, rois(rng, 1 / case["scale"], dtype)[: 0 if "none" in case else None])
        pooled.backward(normal(rng, *pooled.shape, dtype=dtype))
        yield name, {"pooled": pooled.detach(), "grad": maps.grad}


def rois(rng, stride, dtype):
    """RoIs of two maps of 17 x 23: inside, tiny, of no size, partly and wholly outside."""
    inside = boxes(rng, 8, extent=17 * stride, dtype=torch.float64)
    special = torch.tensor(
        [[3, 4, 3.2, 4.1], [5, 5, 5, 5], [-6, -5, 4, 3],
         [20, 14, 40, 30], [90, 90, 99, 99], [-30, -30, -20, -25]],
        dtype=torch.float64,
    )  # fmt: skip
    corners = torch.cat([inside, special * stride])
    image = torch.arange(len(corners), dtype=torch.float64) % 2
    return torch.cat([image[:, None], corners], 1).to(dtype)


def convolution_cases():
    from mmcv.ops import deform_conv2d, modulated_deform_conv2d

    variants = {
        "usual": {},
        "strided": {"stride": 2, "padding": 0},
        "dilated": {"dilation": 2, "padding": (2, 1)},
        "grouped": {"groups": 2, "deform_groups": 3},
    }
    for (kind, dtype), (variant, options) in itertools.product(FLOATS.items(), variants.items()):
        places = ("stride", "padding", "dilation", "groups", "deform_groups")
        given = dict.fromkeys(places, 1) | options
        place = [given[key] for key in places]
        for version, bias in ((1, False), (2, False), (2, True)):
            name = f"deform_conv/{kind}-{variant}-v{version}-{bias}"
            rng = random(name)
            images = normal(rng, 2, 6, 7, 8, dtype=dtype)
            weight = normal(rng, 4, 6 // given["groups"], 3, 3, dtype=dtype)
            height, width = torch.nn.functional.conv2d(images, weight, None, *place[:4]).shape[2:]
            # Some samples lie between pixels, some outside the image.
            offset = 2 * normal(rng, 2, 18 * given["deform_groups"], height, width, dtype=dtype)
            mask = normal(rng, 2, 9 * given["deform_groups"], height, width, dtype=dtype).sigmoid()
            shift = normal(rng, 4, dtype=dtype) if bias else None
            parts = {"images": images, "offset": offset, "weight": weight}
            parts |= {"mask": mask} if version == 2 else {}
            parts |= {"bias": shift} if bias else {}
            for part in parts.values():
                part.requires_grad_()
            if version == 1:
                out = deform_conv2d(images, offset, weight, *place, False, 1)
            else:
                out = modulated_deform_conv2d(images, offset, mask, weight, shift, *place)
            out.backward(normal(rng, *out.shape, dtype=dtype))
            yield name, {"out": out.detach()} | {f"grad_{k}": v.grad for k, v in parts.items()}


def detectors():
    from heads.toolkits.detectors import DETECTORS

    return list(DETECTORS)


def detector_cases(*heads):
    for head in heads or detectors():
        model = detector(head)
        batch = scenes(annotated=True)
        losses = model.train().loss(batch)
        total = torch.stack([value for name, value in losses.items() if "loss" in name]).sum()
        total.backward()
        norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
        yield f"{head}/losses", {name: value.detach() for name, value in losses.items()}
        yield f"{head}/gradient", {"norms": torch.stack(norms).float()}
        with torch.no_grad():
            samples = together(model.eval(), scenes(annotated=False))
        found = [sample.pred_instances for sample in samples]
        result = {key: torch.cat([f[key] for f in found]) for key in ("bboxes", "scores", "labels")}
        if "masks" in found[0]:
            result["mask_areas"] = torch.cat([f.masks.flatten(1).sum(1) for f in found])
        yield f"{head}/predictions", result


def together(model, batch):
    """The toolkit's prediction of a batch that it pads to one size, as it was recorded."""
    return model.model(**model._prepare(batch, training=False), mode="predict")


def detector(head):
    """A detector on PoolFormer-S12, with weights that no version of torch changes."""
    from backbones import create_backbone
    from heads.toolkits.detectors import build_detector

    options = {}
    if head != "retinanet":
        # All candidates train: which of them a sampler would draw depends on torch's generator.
        options = {"train_cfg.rpn.sampler.num": 10**6, "test_cfg.rcnn.score_thr": 0.1}
        stages = [".0", ".1", ".2"] if head.startswith("cascade") else [""]
        options |= {f"roi_head.bbox_head{stage}.fc_out_channels": 32 for stage in stages}
    model = build_detector(
        create_backbone("poolformer_s12", dense=True), 5, name=head,
        num_rois=10**6, num_proposals=40, options=options,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rng = random(name)
            if parameter.ndim > 1:
                fan_in = parameter[0].numel()
                parameter.copy_(normal(rng, *parameter.shape) / fan_in**0.5)
            else:
                parameter.copy_(0.1 * normal(rng, *parameter.shape) + name.endswith("norm.weight"))
    return model


def scenes(*, annotated):
    """Two images of different sizes, the first with four objects and the second with none."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    rng = random("scenes")
    images, samples = [], []
    for height, width, objects in ((96, 128, 4), (80, 75, 0)):
        images.append(torch.from_numpy(rng.randint(0, 256, (3, height, width)).astype(np.uint8)))
        sample = DetDataSample(metainfo={
            "img_shape": (height, width), "ori_shape": (height, width), "scale_factor": (1.0, 1.0),
        })  # fmt: skip
        if annotated:
            corners = torch.from_numpy(rng.uniform(0, 40, (objects, 4))).float()
            corners[:, 2:] = corners[:, :2] + 20 + corners[:, 2:]
            masks = np.zeros((objects, height, width), np.uint8)
            for mask, (x1, y1, x2, y2) in zip(masks, corners.int().tolist(), strict=True):
                mask[y1 : y2 + 1, x1 : (x1 + x2) // 2 + 1] = 1
            sample.gt_instances = InstanceData(
                bboxes=corners, labels=torch.from_numpy(rng.randint(0, 5, objects)),
                masks=BitmapMasks(masks, height, width),
            )  # fmt: skip
        samples.append(sample)
    return {"inputs": images, "data_samples": samples}


GROUPS = {"nms": nms_cases, "roi": roi_cases, "convolution": convolution_cases}
GROUPS["detector"] = detector_cases


def flat(group, *members):
    """All values of a group, or of some of its members, by one name each."""
    return {
        f"{name}/{key}": value.contiguous()
        for name, values in GROUPS[group](*members)
        for key, value in values.items()
    }


def recorded():
    return load_file(RECORDED)


if __name__ == "__main__":
    import mmcv._ext

    assert mmcv._ext.__file__.endswith(".so"), "mmcv has no compiled operators here"
    save_file({k: v for group in GROUPS for k, v in flat(group).items()}, RECORDED)
    print(RECORDED, RECORDED.stat().st_size)
