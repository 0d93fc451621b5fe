"""Download a checkpoint from the Hugging Face Hub and print the folder it lies in.

    python download_model.py --model_name facebook/opt-30b --model_path /models/opt-30b

The folder printed is what ``handler.model_path`` of a model-config.yaml takes. Gated models need a token: run
``hf auth login`` once, or set HF_TOKEN. An interrupted download goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

CONFIGURATION = ["*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", "vocab*", "merges*"]
# A repository often holds the same weights several times; one kind is enough, and the first of these is preferred.
WEIGHTS = ["*.safetensors", "*.bin"]
OTHER_FRAMEWORKS = ["original/*", "onnx/*", "flax_model*", "tf_model*", "*.msgpack", "*.h5", "*training_args*"]


def weight_pattern(model_name: str, revision: str | None) -> str:
    """Return the pattern of the weight files to take.

    Raises:
        SystemExit: When the repository has none that can be served.
    """
    files = HfApi().list_repo_files(model_name, revision=revision)
    for pattern in WEIGHTS:
        if any(Path(file).match(pattern) for file in files if "/" not in file):
            return pattern
    sys.exit(f"{model_name} has no {' or '.join(WEIGHTS)} files, so it cannot be served.")


def download(model_name: str, model_path: str | None, revision: str | None) -> str:
    """Fetch configuration, tokenizer and one kind of weights; return the local folder."""
    patterns = [*CONFIGURATION, weight_pattern(model_name, revision)]
    return snapshot_download(
        model_name,
        revision=revision,
        local_dir=model_path,
        allow_patterns=patterns,
        ignore_patterns=OTHER_FRAMEWORKS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name", "-m", required=True, help="repository on the Hub, such as facebook/opt-30b")
    parser.add_argument("--model_path", "-o", help="folder to write; by default the Hub's own cache")
    parser.add_argument("--revision", "-r", help="branch, tag or commit; by default the main branch")
    arguments = parser.parse_args()
    try:
        folder = download(arguments.model_name, arguments.model_path, arguments.revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        sys.exit(f"{arguments.model_name}: not found, or not open to this token. {error}")
    except Exception as error:  # noqa: BLE001 - which errors the transport raises depends on the Hub client's release
        sys.exit(f"{arguments.model_name}: the Hub cannot be reached or refused the download. {error}")
    print(Path(folder).resolve())


if __name__ == "__main__":
    main()
