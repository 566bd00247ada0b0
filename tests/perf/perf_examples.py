"""A device and two models with round numbers."""

import dataclasses

from headrace.perf.model_shape import ModelShape
from headrace.perf.profile import DeviceProfile

# SmolLM2-135M: 30 layers, 576 wide, 9 query and 3 KV heads of 64, MLP 1536, vocabulary 49152.
SMOL = ModelShape(
    layers=30,
    hidden=576,
    intermediate=1536,
    linear_params=30 * (576 * 576 * 2 + 2 * 576 * 192 + 3 * 576 * 1536),
    head_params=49152 * 576,
    query_width=576,
    kv_width=192,
)
SLIDING = ModelShape(
    layers=4, hidden=8, intermediate=16, linear_params=100, head_params=50, query_width=8, kv_width=4, window=10,
    window_layers=3,
)  # fmt: skip


def profile(**changes: object) -> DeviceProfile:
    base = DeviceProfile(
        device="cpu",
        device_name="Test CPU",
        cores=2,
        threads=2,
        dtype="float32",
        gemm=((1, 10e9), (64, 80e9), (512, 100e9), (1024, 140e9)),
        kv_read=10e9,
        attention=40e9,
        copy=8e9,
        sum_read=20e9,
        step_overhead=0.004,
        layer_overhead=0.0005,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]
