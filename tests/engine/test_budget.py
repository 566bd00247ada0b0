"""Sizing prefill chunks beside decode tokens, for a target time between tokens."""

from dataclasses import replace

from scheduler_world import World, answer

from headrace.core.config import SchedulerConfig
from headrace.engine.budget import MINIMUM_CHUNK, StepBudget
from headrace.perf.model_shape import ModelShape
from headrace.perf.profile import DeviceProfile
from headrace.perf.step_time import StepTimeModel

# A linear costs 1 ms a row, a step 10 ms; nothing else counts.
PROFILE = DeviceProfile(
    device="cpu",
    device_name="test",
    cores=1,
    threads=1,
    dtype="float32",
    gemm=((1, 2e9), (1024, 2e9)),
    kv_read=1e15,
    attention=1e18,
    copy=1e15,
    sum_read=1e15,
    step_overhead=0.010,
    layer_overhead=0.0,
)
SHAPE = ModelShape(
    layers=1, hidden=1, intermediate=1, linear_params=1_000_000, head_params=1, query_width=1, kv_width=1
)
MODEL = StepTimeModel(PROFILE, SHAPE)
CONFIG = SchedulerConfig(max_num_batched_tokens=512, itl_target=0.0502)


def begun(config: SchedulerConfig = CONFIG, model: StepTimeModel | None = MODEL) -> StepBudget:
    budget = StepBudget(config, model)
    budget.begin()
    return budget


def test_without_a_stream_beside_it_a_prompt_takes_the_whole_budget() -> None:
    assert begun().prefill_tokens(0, 1000) == 512


def test_beside_a_stream_the_step_stays_within_the_target() -> None:
    budget = begun()
    budget.add_decode(100, online=True)
    assert budget.prefill_tokens(0, 1000) == 39  # 10 ms + 40 rows at 1 ms
    budget.add_prefill(0, 39, sampled=False)
    assert 0.049 < budget.predicted() <= 0.0502
    assert budget.prefill_tokens(0, 1000) == 0


def test_an_offline_stream_sets_no_target() -> None:
    budget = begun()
    budget.add_decode(100, online=False)
    assert budget.prefill_tokens(0, 1000) == 511


def test_without_a_target_or_a_model_only_tokens_count() -> None:
    for budget in (begun(replace(CONFIG, itl_target=0.0)), begun(model=None)):
        budget.add_decode(100, online=True)
        assert budget.prefill_tokens(0, 1000) == 511


def test_a_target_that_cannot_be_met_does_not_starve_prompts() -> None:
    budget = begun(replace(CONFIG, itl_target=0.001))
    budget.add_decode(100, online=True)
    assert budget.prefill_tokens(0, 1000) == MINIMUM_CHUNK
    assert budget.prefill_tokens(0, 3) == 3


def test_measured_steps_correct_the_prediction() -> None:
    budget = begun()
    for _ in range(200):
        budget.begin()
        budget.add_decode(100, online=True)
        budget.add_prefill(0, 20, sampled=False)
        budget.observe(budget.predicted(), 2 * (0.010 + 0.021))
    budget.begin()
    budget.add_decode(100, online=True)
    assert budget.prefill_tokens(0, 1000) == 14  # 10 ms + 15 rows, twice as slow as the profile says


def test_offline_decode_beside_a_stream_stops_at_the_target() -> None:
    budget = begun()
    budget.add_decode(100, online=True)
    taken = 0
    while budget.decode_fits(100):
        budget.add_decode(100, online=False)
        taken += 1
    assert taken == 39


def test_the_scheduler_keeps_to_the_target_and_finishes_the_prompt() -> None:
    world = World(pages=200, budget=512, seqs=4, max_len=400, itl_target=0.050, model=MODEL)
    talk = world.add("talk", [1, 2, 3], max_tokens=40)
    world.step()
    long = world.add("long", list(range(300)), max_tokens=2)
    world.drain()
    beside = [plan for plan in world.plans if {chunk.seq for chunk in plan.chunks} == {"talk", "long"}]
    # The simulated device always takes 10 ms, so the correction lets chunks grow, but never beyond its bound.
    assert max(plan.predicted_s for plan in beside) <= 0.050 + 1e-9
    assert 2 <= len(beside) < 40
    assert world.outputs["talk"] == answer(talk)
    assert world.outputs["long"] == answer(long)


def test_offline_tokens_lengthen_an_online_step_by_their_share_only() -> None:
    budget = begun(replace(CONFIG, itl_target=0.0))
    budget.add_prefill(0, 190, sampled=True)  # 200 ms
    budget.begin_offline(0.2)
    assert budget.decode_fits(100)
    assert budget.prefill_tokens(0, 1000) == 39  # the last token of a prompt also goes through the head
    budget.add_prefill(0, 40, sampled=False)
    assert not budget.decode_fits(100)
    assert budget.prefill_tokens(0, 1000) == 0


def test_offline_tokens_alone_take_the_whole_budget() -> None:
    budget = begun()
    budget.begin_offline(0.2)
    assert budget.decode_fits(100)
    assert budget.prefill_tokens(0, 1000) == 512


def test_a_target_binds_offline_tokens_too() -> None:
    budget = begun()
    budget.add_decode(100, online=True)  # 11 ms
    budget.begin_offline(10.0)
    assert budget.prefill_tokens(0, 1000) == 39


def test_without_a_model_the_share_is_of_tokens() -> None:
    budget = begun(replace(CONFIG, itl_target=0.0), None)
    budget.add_prefill(0, 100, sampled=True)
    budget.begin_offline(0.25)
    assert budget.prefill_tokens(0, 1000) == 25
    budget.add_prefill(0, 24, sampled=False)
    assert budget.decode_fits(100)
    budget.add_decode(100, online=False)
    assert not budget.decode_fits(100)


def test_offline_prompts_are_cut_to_a_part_of_the_time_that_online_requests_leave() -> None:
    budget = begun(replace(CONFIG, itl_target=0.0))

    def chunk() -> int:
        budget.begin()
        budget.begin_offline(0.2)
        return budget.prefill_tokens(0, 1000)

    assert chunk() == 512  # nobody has come yet
    budget.finished(online=False, seconds=0.4)
    budget.finished(online=True, seconds=0.1)
    assert chunk() == 89  # 100 ms, a quarter of the gap: 10 ms and 1 ms a token, and the head
    for _ in range(50):
        budget.abandoned(0.02)  # 10 ms of each were spent
    assert chunk() == MINIMUM_CHUNK
    budget.add_prefill(0, MINIMUM_CHUNK, sampled=False)
    assert budget.prefill_tokens(0, 1000) == 0  # the least is of a step, not of a prompt
    for _ in range(40):
        budget.finished(online=False, seconds=0.1)
    assert chunk() == 512  # online requests have stayed away


def test_where_online_requests_leave_no_time_the_share_shrinks() -> None:
    budget = begun(replace(CONFIG, itl_target=0.0))

    def beside() -> int:
        budget.begin()
        budget.add_prefill(0, 190, sampled=True)  # 200 ms
        budget.begin_offline(0.2)
        return budget.prefill_tokens(0, 1000)

    assert beside() == 39
    for _ in range(100):
        budget.finished(online=True, seconds=1.0)
    assert beside() == 10
    for _ in range(100):
        budget.finished(online=False, seconds=1.0)
    assert beside() == 39
