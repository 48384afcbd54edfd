"""Registry: the training programs whose arguments can be written."""

from dtlayout.programs.automodel import AUTOMODEL
from dtlayout.programs.megatron import MEGATRON
from dtlayout.programs.nanotron import NANOTRON
from dtlayout.programs.program import Program
from dtlayout.programs.torchtitan import TORCHTITAN

PROGRAMS: dict[str, Program] = {program.engine: program for program in (MEGATRON, TORCHTITAN, AUTOMODEL, NANOTRON)}
"""Engine → the program for which it predicts."""
