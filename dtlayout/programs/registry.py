"""Registry: the training programs whose arguments can be written."""

from dtlayout.programs.automodel.write import AUTOMODEL
from dtlayout.programs.megatron.write import MEGATRON
from dtlayout.programs.nanotron.write import NANOTRON
from dtlayout.programs.program import Program
from dtlayout.programs.torchtitan.write import TORCHTITAN

PROGRAMS: dict[str, Program] = {program.engine: program for program in (MEGATRON, TORCHTITAN, AUTOMODEL, NANOTRON)}
"""Engine → the program for which it predicts."""
