"""Folders as GPTQ and AWQ write them, made from a tiny model by code that shares nothing with what reads them."""

import copy
import json

import torch
from safetensors.torch import load_file, save_file

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of eight that each place of a word holds


def groups_of(weight, size, symmetric, zeros, rng):
    """Round a matrix [columns, depth] in groups; return numbers [depth, columns], scales and zero points by group."""
    columns, depth = weight.shape
    groups = weight.t().reshape(depth // size, size, columns)
    low = groups.amin(1).clamp_max(0)
    high = groups.amax(1).clamp_min(0)
    if symmetric:
        scales = (torch.maximum(-low, high) / 7.5).half()
        points = torch.full(scales.shape, 8)
    else:
        scales = ((high - low) / 15).half()
        points = torch.round(-low / scales.float()).long().clamp(0, 15)
        points = torch.where(torch.rand(points.shape, generator=rng) < 0.1, zeros, points)
    numbers = torch.round(groups / scales.float()[:, None] + points[:, None]).long().clamp(0, 15)
    return numbers.reshape(depth, columns), scales, points


def weights_of(numbers, scales, points):
    """What the numbers stand for, float64[columns, depth]: exact."""
    size = len(numbers) // len(scales)
    rows = [
        (numbers[step] - points[step // size]).double() * scales[step // size].double() for step in range(len(numbers))
    ]
    return torch.stack(rows).t()


def words_of(eights):
    """Words, int32, of numbers [..., 8], the first in the lowest bits."""
    whole = sum((eights[..., place].long() & 15) << (4 * place) for place in range(8))
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def down_columns(numbers):
    """Words of eight neighbouring steps of depth: [depth / 8, columns]."""
    return words_of(numbers.reshape(len(numbers) // 8, 8, -1).transpose(1, 2))


def across_columns(numbers, places=range(8)):
    """Words of eight neighbouring columns, in an order: [rows, columns / 8]."""
    return words_of(numbers.reshape(len(numbers), -1, 8)[..., list(places)])


def packed_tensors(layout, numbers, scales, points):
    """The tensors of a matrix by the names of their parts."""
    if layout == "awq":
        words = across_columns(numbers, AWQ_PLACES)
        return {"qweight": words, "qzeros": across_columns(points, AWQ_PLACES), "scales": scales}
    stored = points - 1 if layout == "gptq" else points
    return {"qweight": down_columns(numbers), "qzeros": across_columns(stored), "scales": scales}


def write_rounded(
    folder, model, layout="gptq", size=32, symmetric=False, zeros=0, only=None, words=torch.float16, **settings
):
    """Write a model with its layers' matrices in 4 bits; return the model with what these stand for, in float32.

    Args:
        size: of groups; -1: all of the depth.
        zeros: zero point of a tenth of the groups, at random.
        only: part of the names of those matrices that are rounded.
        words: type of all other weights.
        settings: replace what config.json says of the rounding.
    """
    rng = torch.Generator().manual_seed(3)
    twin = copy.deepcopy(model)
    for weight in twin.parameters():  # and not the buffers: angles stay as they are
        weight.data = weight.data.to(words).float()
    copy.deepcopy(twin).to(words).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, module in twin.named_modules():
        if (
            not isinstance(module, torch.nn.Linear)
            or name == "lm_head"
            or name == "embed_out"
            or (only and only not in name)
        ):
            continue
        whole = module.weight.detach()
        parts = groups_of(whole, whole.shape[1] if size == -1 else size, symmetric, zeros, rng)
        del tensors[f"{name}.weight"]
        for part, tensor in packed_tensors(layout, *parts).items():
            tensors[f"{name}.{part}"] = tensor.contiguous()
        if layout != "awq":
            depth = whole.shape[1]
            tensors[f"{name}.g_idx"] = (torch.arange(depth) // (depth if size == -1 else size)).to(torch.int32)
        module.weight = torch.nn.Parameter(weights_of(*parts).float(), requires_grad=False)
    save_file(tensors, file, metadata={"format": "pt"})
    said = {"quant_method": layout.split("_")[0], "bits": 4, "group_size": size}
    said |= (
        {"version": "gemm", "zero_point": True}
        if layout == "awq"
        else {"desc_act": False, "sym": symmetric, "checkpoint_format": layout}
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {key: value for key, value in (said | settings).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return twin
