"""vLLM as the peer of `headrace bench batch-orders`; runs with vLLM's interpreter, not with ours.

    vllm_batch.py MODEL_DIR REQUESTS.jsonl              load, run the file once, print one JSON line
    vllm_batch.py --serve SOCKET MODEL_DIR              load once and wait
    vllm_batch.py --ask SOCKET REQUESTS.jsonl           have the one that waits run the file, with an empty prefix cache

REQUESTS.jsonl: OpenAI batch lines for /v1/completions whose prompt is a list of token ids. The KV budget is 63 blocks
of 128 tokens.
"""

import json
import os
import socket
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{os.cpu_count() - 1}")

BLOCK, BLOCKS = 128, 63


def load(model):
    """An engine with the KV budget of the comparison."""
    from vllm import LLM

    return LLM(
        model,
        dtype="float32",
        max_model_len=4096,
        enable_prefix_caching=True,
        max_num_seqs=64,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
    )


def run(llm, path):
    """One timed pass over a file, the prefix cache being empty."""
    from vllm import SamplingParams

    with open(path) as lines:
        bodies = [json.loads(line)["body"] for line in lines]
    prompts = [{"prompt_token_ids": body["prompt"]} for body in bodies]
    params = [SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True) for body in bodies]
    few = sorted(range(len(bodies)), key=lambda i: len(bodies[i]["prompt"]))[:: max(1, len(bodies) // 3)]
    llm.generate([prompts[i] for i in few], [params[i] for i in few], use_tqdm=False)  # first touches
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache was not emptied")
    start = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    wall = time.perf_counter() - start
    tokens = sum(len(each.prompt_token_ids) + len(each.outputs[0].token_ids) for each in done)
    hits = sum(each.num_cached_tokens or 0 for each in done)
    return {"peer": "vllm", "wall_s": wall, "total_tokens_per_s": tokens / wall, "hit_tokens": hits}


def serve(address, model):
    """Load once, then run the files that `ask` names."""
    llm = load(model)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen(1)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            asked, _ = listener.accept()
            with asked, asked.makefile("rw") as stream:
                try:
                    answer = run(llm, stream.readline().strip())
                except Exception as error:
                    answer = {"error": repr(error)}
                stream.write(json.dumps(answer) + "\n")


def ask(address, path):
    """Have the engine that waits run a file."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        with link.makefile("rw") as stream:
            stream.write(os.path.abspath(path) + "\n")
            stream.flush()
            answer = json.loads(stream.readline())
    if "error" in answer:
        sys.exit(answer["error"])
    return answer


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    else:
        result = ask(*sys.argv[2:]) if sys.argv[1] == "--ask" else run(load(sys.argv[1]), sys.argv[2])
        sys.stdout.write(json.dumps(result) + "\n")
