# Shared by the scripts beside it, which source it: where things are, and which Python to use.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export TS_PIPPY_VENV="${TS_PIPPY_VENV:-$REPO/.venv}"
case "$TS_PIPPY_VENV" in /*) ;; *) TS_PIPPY_VENV="$PWD/$TS_PIPPY_VENV" ;; esac
export TS_PIPPY_STATE="${TS_PIPPY_STATE:-$REPO/.quickstart}"
case "$TS_PIPPY_STATE" in /*) ;; *) TS_PIPPY_STATE="$PWD/$TS_PIPPY_STATE" ;; esac
export PYTHONUNBUFFERED=1
VENV_BIN="$TS_PIPPY_VENV/bin"

# Print the Python that makes the virtual environment: $PYTHON, python3.11, or a python3 that is new enough.
base_python() {
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer is needed: install it, or name one with PYTHON=/path/to/python3.11." >&2
    return 1
}
