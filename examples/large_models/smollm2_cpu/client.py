"""Chat with the served model from a terminal; an empty line ends it.

python client.py http://127.0.0.1:8080/predictions/smollm2
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request


def chat(url: str, messages: list[dict[str, str]], temperature: float) -> str:
    """Send the conversation so far and return the model's reply."""
    body = {"messages": messages, "max_new_tokens": 256, "temperature": temperature}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return str(json.load(response)["text"]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080/predictions/smollm2")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token every time")
    arguments = parser.parse_args()
    messages: list[dict[str, str]] = []
    while question := input("you:   ").strip():
        messages.append({"role": "user", "content": question})
        try:
            reply = chat(arguments.url, messages, arguments.temperature)
        except urllib.error.HTTPError as error:
            sys.exit(f"status {error.code}: {error.read().decode(errors='replace')}")
        except urllib.error.URLError as error:
            sys.exit(f"no server at {arguments.url}: {error.reason}")
        messages.append({"role": "assistant", "content": reply})
        print(f"model: {reply}")


if __name__ == "__main__":
    try:
        main()
    except (EOFError, KeyboardInterrupt):
        print()
