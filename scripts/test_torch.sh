#!/bin/sh
# test_torch.sh VERSION: what depends on torch, tested on another version of it, in an environment of its own.
#
# pip takes torch from where it always does, which for most versions means gigabytes of CUDA's libraries; the tests run
# on the CPU. An index of CPU builds in PIP_EXTRA_INDEX_URL may spare them.
set -eu
version=${1:?usage: make test-torch VERSION=2.15.0}
venv=.venv-torch-$version
if [ ! -e "$venv/.installed" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet "torch==$version"
    grep -v '^torch==' constraints.txt > "$venv/requirements.txt"
    "$venv/bin/pip" install --quiet --no-deps --requirement "$venv/requirements.txt"
    "$venv/bin/pip" install --quiet --no-deps --editable .
    touch "$venv/.installed"
fi
OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not thorough" \
    tests/ops tests/models tests/plans tests/mesh tests/pipelining tests/training tests/checkpoint tests/measure \
    tests/dryrun tests/distributed/test_parity.py \
    tests/distributed/test_sharding.py tests/distributed/test_runtime.py tests/distributed/test_kernel_pairs.py \
    tests/test_bench_gpu.py
