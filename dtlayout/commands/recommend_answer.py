"""What one search has to say: the best layouts, what stands against others, and whatever else was asked."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtlayout.costmodel.estimate import Estimate
from dtlayout.planner.baselines import Baseline, choose_by_playbook, choose_by_thumb
from dtlayout.planner.reasons import Verdict, describe_lead, judge, neighbours, parse_layout
from dtlayout.planner.search import Search, SearchResult
from dtlayout.planner.space import Space, parse_choice

if TYPE_CHECKING:
    from dtlayout.commands.verify import Verified

BASELINES = {"thumb": choose_by_thumb, "playbook": choose_by_playbook}


class Answer:
    """Everything that one search has to say."""

    def __init__(
        self, search: Search, result: SearchResult, options: argparse.Namespace, verified: Sequence["Verified"]
    ):
        self.result, self.options, self.verified = result, options, verified
        self.scenario, self.best = search.space.scenario, result.ranked[0]
        following = zip(result.ranked, result.ranked[1:], range(2, len(result.ranked) + 1), strict=False)
        self.leads = [describe_lead(own, after, place) for own, after, place in following]

        def verdict(layout: Any, kernels: Any) -> Verdict:
            return judge(search, layout, kernels, self.best)

        self.against = [(name, verdict(layout, kernels)) for name, layout, kernels in neighbours(search, self.best)]
        self.why_not: Verdict | None = None
        self.completed: Estimate | None = None
        self.baseline: Baseline | None = None
        if options.why_not:
            choices = dict(parse_choice(text) for text in options.why_not.split(","))
            self.why_not = verdict(*parse_layout(search.space, choices))
            wanted = Space(self.scenario, {**search.space.fixed, **choices}, search.space.avoided)
            self.completed = next(iter(Search(wanted, options.max_memory).run(top=1).ranked), None)
        if options.baseline:
            self.baseline = BASELINES[options.baseline](Search(Space(self.scenario), options.max_memory))
