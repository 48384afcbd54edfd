"""Names of the GPUs of this host, found without loading torch."""

import subprocess
from functools import cache

from dtlayout.base.interpreter import run_code


@cache
def ask_device_names() -> tuple[str, ...]:
    """Name of each GPU of this host, as torch calls it; another process asks, so that its GPU memory is freed again."""
    question = "from torch import cuda; number = cuda.device_count() if cuda.is_available() else 0; "
    question += "print(*map(cuda.get_device_name, range(number)), sep='\\n')"
    asked = subprocess.run(run_code(question), capture_output=True, text=True, check=True)
    return tuple(asked.stdout.splitlines()) if asked.stdout.strip() else ()
