"""`headrace bench`: measurements of the engine and the device; each command parses, calls `headrace.bench`, prints."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.report import report
from headrace.cli.bench_batch_dp import bench_batch_dp
from headrace.cli.bench_batch_online import bench_batch_online
from headrace.cli.bench_batch_orders import bench_batch_orders
from headrace.cli.bench_blend_sim import bench_blend_sim
from headrace.cli.bench_bursty import bench_bursty
from headrace.cli.bench_client import bench_serve
from headrace.cli.bench_long_doc_qa import bench_long_doc_qa
from headrace.cli.bench_mixed_steps import bench_mixed_steps
from headrace.cli.bench_parity import bench_parity
from headrace.cli.bench_pipeline import bench_pipeline
from headrace.cli.bench_planning import bench_planning
from headrace.cli.bench_restore import bench_restore
from headrace.cli.bench_reuse import bench_reuse
from headrace.cli.bench_store import bench_store
from headrace.cli.help import Command
from headrace.cli.options import Json, with_settings
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError

bench = typer.Typer(
    help="Measure this device, this engine, or any server.", no_args_is_help=True, rich_markup_mode=None
)
bench.command("serve", cls=Command)(bench_serve)
bench.command("parity", cls=Command)(bench_parity)
bench.command("long-doc-qa", cls=Command)(bench_long_doc_qa)
bench.command("reuse", cls=Command)(bench_reuse)
bench.command("batch-online", cls=Command)(bench_batch_online)
bench.command("bursty", cls=Command)(bench_bursty)
bench.command("store", cls=Command)(bench_store)
bench.command("restore", cls=Command)(bench_restore)
bench.command("batch-orders", cls=Command)(bench_batch_orders)
bench.command("batch-dp", cls=Command)(bench_batch_dp)
bench.command("blend-sim", cls=Command)(bench_blend_sim)
bench.command("pipeline", cls=Command)(bench_pipeline)
bench.command("mixed-steps", cls=Command)(bench_mixed_steps)
bench.command("planning", cls=Command)(bench_planning)

Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="draw the result (needs headrace[plot])")]
Rounds = Annotated[int, typer.Option(min=1, help="repetitions; medians are reported")]


@bench.command(cls=Command)
def calibrate(
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="what to measure")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores")] = 0,
    dtype: Annotated[str, typer.Option(metavar="auto|float32|bfloat16|float16", help="of the weights")] = "auto",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the profile instead")] = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Measure this device into the profile that scheduling and rooflines use."""
    from headrace.bench import calibrate as measuring
    from headrace.bench import plot as drawing
    from headrace.perf.profile import save

    drawing.check(plot)
    busy = measuring.load_average()
    profile = measuring.calibrate(device, threads, dtype)
    path = save(profile, output)
    if plot is not None:
        drawing.gemm(profile, plot)
    result = {
        "profile": str(path),
        "device_name": profile.device_name,
        "threads": profile.threads,
        "dtype": profile.dtype,
        **{f"gemm_{rows}_gflops": round(rate / 1e9, 1) for rows, rate in profile.gemm},
        "kv_read_gb_s": round(profile.kv_read / 1e9, 2),
        "attention_gflops": round(profile.attention / 1e9, 1),
        "copy_gb_s": round(profile.copy / 1e9, 2),
        "sum_gb_s": round(profile.sum_read / 1e9, 2),
        "step_overhead_ms": round(profile.step_overhead * 1e3, 3),
        "layer_overhead_ms": round(profile.layer_overhead * 1e3, 3),
        "load_average_before": round(busy, 2),
    }
    report("Device profile", result, as_json=json)


@bench.command(cls=Command)
@with_settings(EngineConfig)
def throughput(
    config: EngineConfig,
    requests: Annotated[Path | None, typer.Option(metavar="FILE", help="OpenAI batch JSONL; default: mixed")] = None,
    outputs: Annotated[Path | None, typer.Option(metavar="FILE", help="write {custom_id, token_ids} lines")] = None,
    write_requests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the mixed workload as JSONL and measure nothing")
    ] = None,
    workload_seed: Annotated[int, typer.Option(help="of the mixed workload")] = 0,
    peer: Annotated[str | None, typer.Option(metavar="transformers", help="a peer to run beside")] = None,
    peer_command: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="a peer program; {requests} is the file, its last line JSON with its rates"),
    ] = None,
    rounds: Rounds = 1,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Run a batch offline through the engine, beside the roofline and peers, alternating."""
    from headrace.bench.workload import mixed, read_requests
    from headrace.bench.workload import write_requests as write

    if write_requests is not None:
        batch = mixed(workload_seed)
        write(batch, write_requests)
        report("Workload", {"file": str(write_requests), "requests": len(batch)}, as_json=json)
        return
    if peer not in (None, "transformers"):
        raise ConfigError(f"--peer: {peer!r} is not one of transformers; run others with --peer-command")

    from tempfile import TemporaryDirectory

    from headrace.bench import plot as drawing
    from headrace.bench import throughput as measuring
    from headrace.bench.local_engine import LocalEngine, model_folder, tokenizer_of
    from headrace.bench.peers import CommandPeer, Peer, TransformersPeer

    drawing.check(plot)
    folder = model_folder(config)
    batch = (
        read_requests(requests, lambda: tokenizer_of(config.model.tokenizer or folder))
        if requests
        else mixed(workload_seed)
    )
    engine = LocalEngine(config)
    with TemporaryDirectory() as scratch:
        peers: list[Peer] = []
        if peer_command is not None:
            file = requests or Path(scratch) / "requests.jsonl"
            if requests is None:
                write(batch, file)
            peers.append(CommandPeer(peer_command, file))
        if peer is not None:
            peers.append(TransformersPeer(folder, engine.info.dtype, batch))
        result = measuring.measure(engine, batch, peers, rounds)
    if outputs is not None:
        measuring.write_outputs(batch, result.ours[-1], outputs)
    if plot is not None:
        rates = {"headrace": [run.total_tokens_per_s for run in result.ours]}
        rates |= {name: [run.total_tokens_per_s for run in runs] for name, runs in result.peers.items()}
        drawing.bars(rates, "tokens/s, prompt and output", "Offline throughput", plot)
    report("Offline throughput", result.summary(), as_json=json)


@bench.command(cls=Command)
@with_settings(EngineConfig)
def sampling(
    config: EngineConfig,
    sequences: Annotated[int, typer.Option(min=1, help="running sequences")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of each")] = 48,
    rounds: Rounds = 3,
    json: Json = False,
) -> None:
    """What temperature 0.8 with top-p 0.95 costs against greedy."""
    from headrace.bench.local_engine import LocalEngine, with_scheduler
    from headrace.bench.sampling import measure

    config = with_scheduler(config, max_num_seqs=max(sequences, config.scheduler.max_num_seqs))
    report("Sampling", measure(LocalEngine(config), sequences, tokens, rounds).summary(), as_json=json)


@bench.command(cls=Command)
@with_settings(EngineConfig)
def step(
    config: EngineConfig,
    clients: Annotated[int, typer.Option(min=1, help="streaming clients")] = 32,
    tokens: Annotated[int, typer.Option(min=16, help="tokens of each stream")] = 96,
    rounds: Rounds = 3,
    json: Json = False,
) -> None:
    """Decode-step time of the served engine, while clients stream, against the engine alone."""
    from headrace.bench.step import measure

    report("Decode step", measure(config, clients, tokens, rounds).summary(), as_json=json)


@bench.command(cls=Command)
@with_settings(EngineConfig)
def latency(
    config: EngineConfig,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="length of the prompt beside the user")] = 3000,
    vocab_size: Annotated[int, typer.Option(help="token ids of the prompts are below this")] = 40000,
    rounds: Rounds = 3,
    json: Json = False,
) -> None:
    """A long prompt beside a streaming user, with --itl-target (150ms unless given)."""
    from headrace.bench.latency import measure
    from headrace.bench.local_engine import with_scheduler

    if not config.scheduler.itl_target:
        config = replace(with_scheduler(config, itl_target=0.15))
    report("Latency", measure(config, prompt_tokens, rounds, vocab_size), as_json=json)


@bench.command(cls=Command)
def attention(
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="whose kernels")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores")] = 0,
    kv_dtype: Annotated[str, typer.Option(metavar="float32|bfloat16|float16", help="of the stored KV")] = "float32",
    rounds: Rounds = 7,
    json: Json = False,
) -> None:
    """Rates of the paged attention; `decode_8k_share` is its KV bandwidth as a share of torch.sum's."""
    from headrace.kernels.attention import KV_DTYPES, backend_for
    from headrace.kernels.measure import measure

    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype: {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    rates = measure(backend_for(device, threads=threads), kv_dtype=kv_dtype, rounds=rounds)
    report("Attention", {name: round(value, 4) for name, value in rates.items()}, as_json=json)
