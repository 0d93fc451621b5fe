"""Send every line of a text file as a prompt, all at the same time, and print the answers and the rate.

python client.py sample_text.txt --url http://127.0.0.1:8080/predictions/opt
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any


def complete(url: str, max_new_tokens: int, prompt: str) -> dict[str, Any]:
    """Send one prompt and return the decoded answer."""
    body = json.dumps({"prompt": prompt, "max_new_tokens": max_new_tokens}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="one prompt a line")
    parser.add_argument("--url", default="http://127.0.0.1:8080/predictions/opt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    prompts = [line for line in arguments.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        sys.exit(f"{arguments.file} holds no prompt.")
    start = time.monotonic()
    try:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(partial(complete, arguments.url, arguments.max_new_tokens), prompts))
    except urllib.error.HTTPError as error:
        sys.exit(f"status {error.code}: {error.read().decode(errors='replace')}")
    except urllib.error.URLError as error:
        sys.exit(f"no server at {arguments.url}: {error.reason}")
    seconds = time.monotonic() - start
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"{prompt}{answer['text']}\n")
    num_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    print(f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
