"""Bytes of the tensors of a block, the head and the embedding of one layout.

Legend: T tokens of a microbatch on one cp rank, h hidden, q width of all query heads, a heads, s sequence, t = tp; e
bytes of the compute format, w of the exact one (fp32 or finer) in which norms, RoPE and the loss compute. To be read
with models/llama.py and ops/*.py. liveness.py says when they come and go.

[Note: what a compiled block keeps]
torch.compile sees forward and backward together and keeps what is cheapest to go on from: the results of matmuls and
attention and what they read, one number a token for each norm, and the result of o instead of the second norm's input.
It computes silu(gate) again. Its norms are so as if one kernel did them. `tests/plans/test_compile.py` counts.
"""

from functools import cached_property
from itertools import takewhile
from math import ceil

from dtlayout.costmodel.attention import name_kept, scores_of
from dtlayout.costmodel.fsdp2.liveness import walk_keeping, walk_saving
from dtlayout.costmodel.fsdp2.tape import Measures, Rounding, SizedEntry, SizedTape, size_block, size_end
from dtlayout.costmodel.scenario import (
    Scenario,
    format_sizes,
    fullest_share,
    gathers_weights_cast,
    matmul_alignment,
    scales_experts,
    sends_cast,
    tokens_of,
    weigh_base,
)
from dtlayout.costmodel.traffic import is_rope_fused
from dtlayout.models.families import block_tape, describe
from dtlayout.models.operations import ATTENDED, Norm
from dtlayout.models.scores import NONE, ScoreBytes
from dtlayout.models.tape import HIDDEN, TapeOptions
from dtlayout.spec.context_parallel import CONTEXT_METHODS, chunk_length
from dtlayout.spec.fake_quant import FAKE_QUANT_FORMATS
from dtlayout.spec.kernel_records import AttentionKernel, LossKernel, NormKernel, SwigluKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import Kernels, count_loss_chunks
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import BYTES
from dtlayout.spec.recompute import Recompute

_FULL = Recompute.parse("full")
_INDEX_BYTES = 8
"""An int64."""


class Sizes:
    """Bytes of one microbatch's tensors on one rank, [Note: what a compiled block keeps]."""

    def __init__(self, scenario: Scenario, layout: Layout, kernels: Kernels, *, ends_gradients: bool = False):
        """Take a layout, or a BlockLayout of cache_keys.py; on CPU no kernel of PyTorch does a whole norm.

        With `ends_gradients` the block's input needs no gradient.
        """
        tokens, e = tokens_of(scenario, layout), BYTES[scenario.precision.compute]
        norm, swiglu = find_kernel(NormKernel, kernels.norm), find_kernel(SwigluKernel, kernels.swiglu)
        self.description = describe(scenario.model)
        """The operations whose tensors these are."""
        self.element = tokens * e
        """One element a token in the compute format, T·e."""
        self.exact_element = tokens * max(e, 4)
        """One element a token in the exact format, T·w."""
        self.casts = self.element < self.exact_element
        """Whether the compute format is not the exact one."""
        self.tp = layout.tp
        """Ranks that share what lies inside a branch."""
        self.is_split = layout.tp > 1
        """Whether tp splits matmuls."""
        self.shards_sequence = layout.shards_sequence
        """Whether tp splits the residual stream too."""
        is_one_sequence = layout.micro_batch == 1 and not scenario.engine.features.dtensor_activations
        self.reorders = layout.shards_sequence and not is_one_sequence
        """Whether what tp gathers or scatters is copied from the order of ranks, or into it: of one sequence it is that
        of tokens."""
        self.stream_ranks = layout.tp if layout.shards_sequence else 1
        """Ranks that share the residual stream outside of branches."""
        self.whole = self.element * scenario.model.hidden_size
        """Hidden states, T·h·e."""
        self.stream = self.whole / self.stream_ranks
        """The residual stream: hidden states outside of branches."""
        self.input_ranks = self.stream_ranks if scenario.engine.features.regathers_inputs else 1
        """Ranks that share what a matmul that opens a branch keeps of its input."""
        self.norm_output = self.whole / self.input_ranks
        """The output of a norm as the matmuls that read it keep it: whole, or what they gather again in backward."""
        casts, is_kernel = e < 4, kernels.compiles_blocks or scenario.cluster.gpu.device_type not in norm.separate
        first = self.description.block[0]
        has_own = isinstance(first, Norm) and bool(first.keeps) and not kernels.compiles_blocks
        self.keeps_stream = first.keeps_input(casts=casts) if has_own else is_kernel or not casts  # type: ignore[union-attr]
        """Whether a norm keeps its input itself, which a checkpoint or the runtime then need not keep."""
        self._options = TapeOptions(
            is_split=self.is_split,
            separate_norms=not is_kernel,
            casts_norms=casts,
            keeps_exact_product=norm.keeps_exact,
            num_gated_kept=2 if kernels.compiles_blocks else swiglu.num_kept - 1,
            fullest=fullest_share(scenario, layout),
            is_own_mixture=scenario.engine.features.nests_experts,
            exchanges=layout.ep > 1,
            compiles=kernels.compiles_blocks,
            ends_gradients=ends_gradients,
            alignment=matmul_alignment(scenario),
            scales_experts=scales_experts(scenario, kernels),
        )
        self.has_own_mixture = self._options.is_own_mixture and self.description.experts is not None
        """True if blocks have experts, and our trainer runs them: each of their tensors is known."""
        self.kept_matmuls = scenario.engine.features.kept_matmuls
        """Share of matmuls whose results selective recomputation keeps, where it keeps any."""
        self.separate_rope = not is_rope_fused(scenario, kernels)
        """True if RoPE is several operations, each with an exact result in memory."""
        self.keeps_last = not kernels.compiles_blocks
        """Whether selective recomputation keeps the last matmul's result too, of which backward needs nothing."""
        self.model = scenario.model
        """The model whose blocks are sized."""
        self._weigh_attention(scenario, layout, kernels)
        self._weigh_loss(scenario, layout, kernels)
        sizes = format_sizes(scenario)
        self._measures = Measures(
            tokens * sizes.compute, tokens * sizes.cast, tokens * sizes.exact, tokens * _INDEX_BYTES,
            layout.tp, self.stream_ranks, self.input_ranks,
            self.reorders, self.is_split and scenario.engine.features.dtensor_activations,
            self.attention, self.attention_results, self.copies_attention, self.forward_work, self.backward_work,
            (4 + self.casts) * self.separate_rope,
            *weigh_base(scenario), attention_kept_as=name_kept(scenario, kernels),
        )  # fmt: skip
        if scenario.precision.matmul_format and scenario.engine.features.casts_itself:
            # Eager kernels scale a copy in fp32, which a compiler leaves out.
            self._measures = self._measures._replace(
                tokens=tokens,
                casting=1.0 if kernels.compiles_blocks else 5.0,
                sends_cast=sends_cast(scenario, layout),
                casts_weights=not gathers_weights_cast(scenario),
                num_experts=self.description.experts.number / layout.ep if self.description.experts else 1.0,
            )

        if rounds := FAKE_QUANT_FORMATS.get(scenario.precision.fake_quant):
            # Eager kernels round a copy in the exact format.
            peak = e + (max(e, 4) if e < 4 and not kernels.compiles_blocks else 0)
            self._measures = self._measures._replace(
                rounding=Rounding(peak, e, rounds.scale_bytes, rounds.group),
            )

    def _weigh_attention(self, scenario: Scenario, layout: Layout, kernels: Kernels) -> None:
        """Flash: q, k, v, the output and a number a row, and backward the gradients of q, k and v.

        sdpa-math: exact copies of q, k and v, each for every query head, and the softmax; results of its two matmuls
        are exact. Forward has also the scores with the mask, and k as it was, but no output yet; backward the gradients
        of softmax and scores.
        """
        model, seq_len = scenario.model, scenario.batch.seq_len
        kernel = find_kernel(AttentionKernel, kernels.attention)
        attention = self.description.attention
        query, key = self.split(attention.query_width), self.split(attention.num_kv_heads * attention.head_width)
        output = self.split(attention.output_width)
        inputs = 2 * query + output if kernel.repeats_heads else self.split(attention.input_width)
        rows = self.exact_element * model.num_heads / self.tp
        has_mask = scenario.document_mask and kernel.needs_mask(scenario.cluster.gpu.device_type)
        self.mask = self.element * seq_len if has_mask else 0.0
        """The mask that keeps documents apart in all layers of a stage, s numbers a token; 0 where there is none."""
        self.keeps_mask = kernel.keeps_mask
        """Whether attention keeps the mask for its backward."""
        self.attention_results = output + (0.0 if kernel.holds_scores else rows)
        """Results of attention's kernels, which selective recomputation keeps instead of q and k."""
        saved: float = getattr(scenario.engine.constants, kernel.saved) if kernel.saved else 0.0
        saved *= tokens_of(scenario, layout) * model.num_heads / self.tp
        saved *= seq_len if kernel.holds_scores else model.head_width
        self.copies_attention = kernel.copies_exactly and layout.cp == 1
        """Whether attention keeps copies of queries, keys and values."""
        self.attention = inputs + self.split(attention.held) + self.attention_results + saved
        """Kept by attention, its output included."""
        self.forward_work = 0.0
        """Work space of attention's forward at its fullest, beside what it keeps."""
        self.backward_work = inputs
        """Work space of attention's backward: gradients of q, k and v, or of scores."""
        if kernel.copies_exactly:
            copy, softmax = rows * model.head_width, rows * seq_len
            self.attention, self.attention_results = 3 * copy + softmax + output, softmax + copy
            self.forward_work, self.backward_work = softmax + key, max(inputs, 2 * softmax)
        if (own := scores_of(scenario, kernels)) != NONE:
            self._weigh_scores(scenario, layout, own)
        if layout.cp > 1:
            by_heads = CONTEXT_METHODS[layout.cp_method].splits_heads
            (self._weigh_exchanges if by_heads else self._weigh_parts)(scenario, layout, kernel)

    def _weigh_scores(self, scenario: Scenario, layout: Layout, found: ScoreBytes) -> None:
        """Attention of a model's own code, or with a mask, as its trace has measured it: keys and values are repeated
        for every query head, and a recomputation keeps the results of batched matmuls."""
        attention, tokens = self.description.attention, tokens_of(scenario, layout)
        pairs = tokens * scenario.batch.seq_len
        scores = pairs * attention.num_heads / self.tp
        self.mask, self.keeps_mask = pairs * found.mask, found.keeps_mask
        if not found.repeats_heads:
            return
        query, output = self.split(attention.query_width), self.split(attention.output_width)
        inputs = 2 * query + output
        rows = 0.0 if found.are_in_memory else self.exact_element * attention.num_heads / self.tp
        self.attention = inputs + self.split(attention.held) + output + rows
        self.attention += scores * found.kept + pairs * found.pair_kept
        self.attention_results = output + (scores * found.products if found.are_in_memory else rows)
        self.forward_work = scores * found.in_forward + pairs * found.pair_in_forward
        self.backward_work = max(inputs, output + scores * found.in_backward + pairs * found.pair_in_backward)
        self.copies_attention = False

    def _weigh_exchanges(self, scenario: Scenario, layout: Layout, kernel: AttentionKernel) -> None:
        """Own queries, keys and values while heads are exchanged: packed, as they come, and in the order of positions;
        of gradients what leaves attention, as it goes and as it comes. The output is kept as attention gave it, and as
        the next matmul reads it, if that saves it."""
        attention = self.description.attention
        inputs, output = self.split(attention.input_width), self.split(attention.output_width)
        self.attention += output * self._saves_attended - self.split(attention.held)  # of which messages are copies
        self.forward_work = max(inputs + self.forward_work, 3 * inputs - self.attention_results)
        self.backward_work = max(self.backward_work, 3 * inputs)

    @property
    def _saves_attended(self) -> bool:
        """True if a matmul saves attention's result: one that is trained, or has an adapter."""
        matmuls = [each for each in block_tape(self.model) if each.kind == "matmul"]
        return any(each.name == ATTENDED for entry in matmuls for each in (*entry.saves, *entry.saves_again))

    def _weigh_parts(self, scenario: Scenario, layout: Layout, kernel: AttentionKernel) -> None:
        """Kept are q, k, v, what is held beside them, the output and a number a row; joined results and all gradients
        are exact.

        Ring: keys and values that are seen and the next ones, and of gradients own ones, those of the piece and, of
        more than two ranks, those that go and come. Gather: keys and values of all other ranks, twice while they are
        put in order, and gradients of all, own ones and those of the piece. Beside documents a chunk's queries are a
        piece, as if one document were all.
        """
        attention, tokens = self.description.attention, tokens_of(scenario, layout)
        exact = self.exact_element / self.element
        inputs, output, kv = map(self.split, (attention.input_width, attention.output_width, attention.kv_width))
        rows = self.exact_element * attention.num_heads / self.tp
        gathers, cp, own_keys = layout.cp_method == "gather", layout.cp, tokens / layout.micro_batch
        self.attention_results, self.mask = output + rows, 0.0
        self.attention = inputs + self.split(attention.held) + self.attention_results
        at_once, others, summed = (cp - 1, cp - 1, cp) if gathers else (1, min(cp, 3) - 1, 2 * min(cp, 3) - 4)
        own_chunk = chunk_length(scenario.batch.seq_len, cp) / own_keys
        piece = 2 * own_chunk if scenario.document_mask else 1.0  # the last chunk sees twice what queries do on average

        def work(num_keys: float, copies: float) -> float:
            """Bytes of scores with so many keys for each query: exact copies, and a cast one; 0 without scores."""
            num_keys *= piece
            scores = rows * num_keys if kernel.holds_scores else 0.0
            cast = scores / exact if self.casts else 0.0
            return copies * scores + cast

        seen = own_keys * at_once / 2  # keys of other ranks, of each query
        grouped = (3 if kernel.holds_scores else 1) * output
        joining = exact * output + max(2 * exact * output, work(seen, 1))
        ordering = (2 * cp - 1) * kv * gathers + exact * output
        self.forward_work = max(2 * kv + work(own_keys, 1), others * kv + joining, ordering) - output
        own_backward = 2 * kv + exact * kv + work(own_keys, 2)
        others_backward = (others + at_once) * kv + (1 + summed) * exact * kv
        others_backward += max(at_once * exact * kv, work(seen, 2))
        self.backward_work = exact * output + grouped + max(own_backward, others_backward)

    def _weigh_loss(self, scenario: Scenario, layout: Layout, kernels: Kernels) -> None:
        loss, tokens = find_kernel(LossKernel, kernels.loss), tokens_of(scenario, layout)
        features = scenario.engine.features
        is_parallel = features.loss == "vocab-parallel"
        columns = scenario.model.vocab_size / (self.tp if is_parallel else 1)
        at_once = ceil(tokens / count_loss_chunks(tokens)) / tokens if loss.in_chunks else 1
        self.logits = self.element * columns * (at_once if loss.joins_matmul else 1)
        """Logits that are there at once, in the compute format; their gradient is as large."""
        weight = columns * scenario.model.hidden_size * BYTES[scenario.precision.compute]
        self.joins_loss = loss.joins_matmul
        """Whether forward computes the gradients of what the head reads, and of its weight."""
        self.head_weight = weight if loss.joins_matmul and self.description.head.trains else 0.0
        """The gradient of the head's weight; 0 where that is not computed in forward, or at all."""
        self.capped = self.logits if self.description.caps_logits and not loss.joins_matmul else 0.0
        """Logits that a softcap keeps for its backward; 0 where forward computes the gradients."""
        early = self.head_weight + self.whole if loss.joins_matmul else 0.0
        num_own, num_exact = 2, loss.num_exact  # the gradient comes in the place of one that is exact
        if num_exact > 1 and features.fuses_loss(kernels):
            # Autograd keeps the logits and two numbers a token, or of DTensors the logarithmic softmax alone.
            num_own, num_exact = (1, 1) if self.is_split and features.dtensor_activations else (2, 0)
        elif num_exact > 1:
            num_own = 0 if features.frees_logits else 1
            num_exact += self.is_split and features.dtensor_activations  # the softmax, on the way to its gradient
        exact_logits = self.exact_element * columns * at_once
        self.largest_of_loss = exact_logits if num_exact else self.logits
        """The largest tensor of the loss: logits that are there at once, in the exact format where any are."""
        self.loss = early + num_own * self.logits + num_exact * exact_logits + self.capped
        """Held by the loss at its fullest, with exponentials in the exact format; not the norm and what that keeps."""

    @cached_property
    def tape(self) -> SizedTape:
        """Steps of a block, with bytes of their tensors."""
        return size_block(self.model, self._options, self._measures)

    @cached_property
    def _read_tape(self) -> SizedTape:
        """`tape` as if all weights were trained: a forward holds what its matmuls read, saved for backward or not."""
        if all(weight.trains for weight in self.description.block_weights) and not self._options.ends_gradients:
            return self.tape
        return size_block(self.model, self._options._replace(trains_all=True, ends_gradients=False), self._measures)

    @cached_property
    def end(self) -> tuple[SizedEntry, ...]:
        """Steps of the final norm, and the gather of its result for the head; with bytes of their tensors."""
        return size_end(self.model, self._options, self._measures)

    @cached_property
    def first_end(self) -> tuple[SizedEntry, ...]:
        """`end` where nothing before the final norm is trained: its weight alone has a gradient, or not even that."""
        weights = tuple(weight.name for weight in self.description.final_norm.weights if weight.trains)
        if not weights:
            return ()
        *_, norm = (entry for entry in self.end if entry.kind in ("norm", "scale"))
        saves = norm.saves if norm.kind == "norm" else dict([next(iter(norm.saves.items()))])  # no number for each row
        norm = norm._replace(reads={}, saves=saves, weights=weights, work=sum(norm.makes.values()))
        return (norm, *(entry for entry in self.end if entry.kind == "gather"))

    @cached_property
    def block(self) -> float:
        """Kept by a block without recomputation."""
        return sum(entry.saved for entry in self.tape)

    def in_forward(self, recompute: Recompute, layer: int, *, has_backward: bool = True) -> float:
        """Held by a block's forward at its fullest. Without a backward it saves nothing, but recomputation keeps the
        same results until the forward is over."""
        if self.has_own_mixture:
            how = (recompute, layer) if has_backward or recompute.covers(layer) else (_FULL, 0)
            return max(self.in_first_branch, self.in_experts(*how)[1])
        if recompute.covers(layer):
            kept = tuple(self.list_kept(recompute).items())
            return max(walk_keeping(self._read_tape, self.tape, self.stream, kept))
        return max(self._saving if has_backward else walk_keeping(self._read_tape, self.tape, self.stream, ()))

    @property
    def _saving(self) -> tuple[float, ...]:
        """Held by a block's forward that is not recomputed, at its fullest in each step of the tape."""
        return walk_saving(self._read_tape, self.tape, self.stream)

    @cached_property
    def in_first_branch(self) -> float:
        """Held by a block's forward until its first branch is closed."""
        first = takewhile(lambda entry: HIDDEN not in entry.makes, self._read_tape)
        return max(held for held, _ in zip(self._saving, first, strict=False))

    def in_experts(self, recompute: Recompute, layer: int) -> tuple[float, float]:
        """Held by the forward of a block of our own when it comes to its experts, and among them at the fullest.

        That is where copies go to their experts, at the last matmul beside its input times scores, where results come
        back, or where they are added up, beside a copy in the order of tokens.
        """
        is_covered, kept = recompute.covers(layer), self.kept(recompute, layer)
        place = next(i for i, each in enumerate(self._read_tape) if each.kind == "dispatch")
        before, among = self._read_tape[:place], self._read_tape[place:]
        (*_, closing), combine = ([each for each in among if each.kind == wanted] for wanted in ("matmul", "combine"))
        dispatch = [each for each in among if each.kind == "dispatch"]
        given, active = sum(dispatch[-1].makes.values()), sum(closing.reads.values())
        results, summed = sum(closing.makes.values()), sum(combine[-1].makes.values())
        returned = sum(combine[-1].reads.values())
        # What every token computes beside experts, and the residual stream where no norm keeps it.
        beside = self.stream * (self.description.num_branches > 1)
        beside += self.stream * (2 if is_covered else not self.keeps_stream)
        kept_among = [each for each in among if is_covered and each.kept_as in recompute.kept]
        if is_covered:
            beside += kept - sum(sum(each.results.values()) for each in kept_among)
        else:
            beside += sum(each.saved for each in before)
        begin = beside + sum(each.saved for each in dispatch[:2])
        sent = beside + sum(each.saved for each in dispatch)
        at_closing = sent + given + active if is_covered else self.block + beside - sum(each.saved for each in before)
        at_closing += sum(
            sum(each.results.values()) for each in kept_among if each is not closing and each.kind != "combine"
        )
        scaled = active + active * self.exact_element / self.element * self.casts
        return begin, max(
            sent + sum(sum(each.makes.values()) for each in dispatch[1:]),
            at_closing + max(scaled, active + results, results + closing.forward_work),
            at_closing + results + sum(sum(each.makes.values()) for each in combine[:-1]),
            at_closing + 2 * returned + summed,
        )

    @property
    def _choice(self) -> tuple[float, float]:
        """Scores and numbers of a token's experts, which every recomputation of our own keeps."""
        per_token = self.description.experts.per_token if self.description.experts and self.has_own_mixture else 0
        return (
            self._measures.exact * per_token / self.stream_ranks,
            self._measures.int64 * per_token / self.stream_ranks,
        )

    def recomputed_at_most(self, recompute: Recompute) -> float:
        """Added by a block that is computed again to what it has kept, at the fullest until its last tensor is saved.

        What was kept is let go of when its place comes. The gathered gradient of the last sum over tp is there before.
        """
        gathered = self.whole if self.shards_sequence and self._read_tape[-2].kind == "sum" else 0.0
        kept = self.list_kept(recompute)
        waiting, fullest = sum(kept.values()), 0.0
        num_steps = max(number for number, entry in enumerate(self.tape, 1) if entry.saves)
        for entry, held, _ in zip(self.tape, self._saving, range(num_steps), strict=False):
            waiting -= sum(kept[name] for name in {*entry.results, *entry.makes} if name in kept)
            fullest = max(fullest, held + waiting)
        return fullest + gathered - self.stream - sum(kept.values())

    def split(self, width: int) -> float:
        """A tensor inside a branch with so many elements a token, over t."""
        return self.element * width / self.tp

    def list_kept(self, recompute: Recompute) -> dict[str, float]:
        """Name → bytes of each result that a recomputed block keeps."""
        tp_closes = self.description.tp_closes_block and not self.has_own_mixture
        return self._list_kept(recompute, last=self.keeps_last, last_sum=self.keeps_last or not tp_closes)

    def _list_kept(self, recompute: Recompute, *, last: bool, last_sum: bool) -> dict[str, float]:
        """`list_kept`, the last matmul's result only if `last`, and that of the last sum over tp only if `last_sum`.

        With anything kept, under tp so are the sums that close a branch; with matmuls also each rank's term of them.
        """
        kept, sums = dict[str, float](), dict[str, float]()
        closing = takewhile(lambda entry: entry.kind != "activation", reversed(self.tape))
        joined = [entry.reads for entry in closing if entry.shares_gradient and HIDDEN not in entry.makes]
        # A compiler sees that the last sum of an adapter is not needed.
        unread = set() if self.keeps_last else {name for names in joined for name in [*names][:-1]}
        for entry in self.tape:
            if entry.kept_as in recompute.kept and not unread & entry.makes.keys():
                share = self.kept_matmuls if entry.kept_as == "matmuls" else 1.0
                kept |= {name: share * size for name, size in entry.results.items()}
            elif entry.kind == "sum" and recompute.is_selective:
                sums |= entry.makes
        if "matmuls" in recompute.kept and not last:
            kept.popitem()
        if sums and not last_sum:
            sums.popitem()
        return kept | sums

    def kept(self, recompute: Recompute, layer: int) -> float:
        """Left by a block for its backward: everything, its input, or also results that are kept."""
        if not recompute.covers(layer):
            return self.block
        return self.stream + sum(self.list_kept(recompute).values()) + sum(self._choice)

    def recomputed(self, recompute: Recompute, layer: int) -> float:
        """Added to what a block has kept when it is computed again, up to the last thing that backward needs.

        The matmuls' results that it needs are there already; others, and sums that are not the last, are let go on the
        way.
        """
        if not recompute.covers(layer):
            return 0.0
        again = self.block - (self.stream if self.keeps_stream else 0.0)
        # Experts come last in a block of our own. What they made is let go of, but for what came back of other ranks.
        own, last = self.has_own_mixture, self.has_own_mixture and not self._options.exchanges
        return again - sum(self._list_kept(recompute, last=last, last_sum=own).values()) - sum(self._choice)
