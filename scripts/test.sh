#!/usr/bin/env bash
# The test command: fetches the real checkpoint the tests convert, then runs every test.
set -euo pipefail
cd "$(dirname "$0")/.."
python scripts/fetch_minilm.py
python -m pytest -q "$@"
