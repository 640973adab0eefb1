"""Layers over a group: what travels where, and what ranks compare."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_GROUPS: Final = "tests/groups/test_groups.py"
_EQUAL: Final = f"{_GROUPS}::test_a_group_computes_the_bits_of_one_rank"
_MOVED: Final = "tests/kernels/test_moved_tokens.py"

MUTANTS: Final = (
    Mutant(
        "a token is sent with all of its routes to every rank",
        "moereg/prepare_finalize/exchange.py",
        old="head = [torch.where(goes_here, topk_ids[token], -1),",
        new="head = [topk_ids[token],",
        tests=(_EQUAL,),
    ),
    Mutant(
        "routes that arrive are placed as if all came from the first rank",
        "moereg/kernels/rows/arrived.py",
        old="first = tl.sum(tl.where(tl.cumsum(tokens, 0) <= row, routes, 0), 0)",
        new="first = tl.sum(tl.where(tl.cumsum(tokens, 0) < 0, routes, 0), 0)",
        tests=("tests/kernels/test_exchanged.py::test_rows_are_those_of_torch",),
    ),
    Mutant(
        "rows that fill up a size go to the expert that was there before",
        "moereg/kernels/rows/arrived.py",
        old="for start in range(tl.sum(routes, 0), num_rows, BLOCK):",
        new="for start in range(tl.sum(routes, 0) + 1, num_rows, BLOCK):",
        tests=("tests/kernels/test_exchanged.py::test_rows_are_those_of_torch",),
    ),
    Mutant(
        "a token comes home once, though several ranks send sums of it",
        "moereg/prepare_finalize/exchange.py",
        old="home_row = torch.where(row >= 0, before[at, 0] + row, -1).to(torch.int32)",
        new="home_row = torch.where((row >= 0) & (at == 0), before[at, 0] + row, -1).to(torch.int32)",
        tests=(_EQUAL,),
    ),
    Mutant(
        "replicas all compute what is gathered",
        "moereg/prepare_finalize/all_gather.py",
        old='if self.problem.placement == "map":',
        new="if False:",
        tests=(_EQUAL,),
    ),
    Mutant(
        "rows of rooms lie over their counts",
        "moereg/prepare_finalize/low_latency.py",
        old="            share = -(-end // 16) * 16",
        new="            share = 0",
        tests=(_EQUAL,),
    ),
    Mutant(
        "results leave from another rank's rows",
        "moereg/prepare_finalize/low_latency.py",
        old="begin = (counts.cumsum(0) - counts).unsqueeze(2)",
        new="begin = counts.cumsum(0).unsqueeze(2)",
        tests=(_EQUAL,),
    ),
    Mutant(
        "Triton's rows of an expert stand in rooms of the rank behind",
        "moereg/kernels/rows/rooms.py",
        old="source = tl.sum((end <= row).to(tl.int32), 0)",
        new="source = tl.sum((end < row).to(tl.int32), 0)",
        tests=(f"{_MOVED}::test_rooms_hold_the_same[float32]",),
    ),
    Mutant(
        "Triton's routes beyond a full room have rows of the next one",
        "moereg/kernels/rows/rooms.py",
        old="row = tl.where((own >= 0) & (place < room), own * room + place, -1)",
        new="row = tl.where(own >= 0, own * room + place, -1)",
        tests=(f"{_MOVED}::test_rooms_hold_the_same[float32]",),
    ),
    Mutant(
        "launches of other numbers are replayed",
        "moereg/kernels/launch/remembered.py",
        old="key = (what, first.device.index, numbers, *kinds)",
        new="key = (what, first.device.index, *kinds)",
        tests=(f"{_MOVED}::test_later_launches_are_replayed",),
    ),
    Mutant(
        "codes travel whose scale all tokens of a call share",
        "moereg/prepare_finalize/wire.py",
        old="or fmt.global_scale or fmt.group[0] != 1 or fmt.bits != 8:",
        new="or fmt.global_scale or fmt.bits != 8:",
        tests=("tests/groups/test_wire.py::test_what_can_travel_as_codes",),
    ),
    Mutant(
        "the experts' own rounding comes after that of the wire in fp32",
        "moereg/prepare_finalize/wire.py",
        old='or problem.dtype != "bfloat16" else scheme',
        new="else scheme",
        tests=("tests/groups/test_wire.py::test_what_can_travel_as_codes",),
    ),
    Mutant(
        "ranks do not compare what they say",
        "moereg/agreement.py",
        old="    if differing:\n",
        new="    if False:\n",
        tests=("tests/groups/test_groups.py::test_ranks_that_cannot_go_together_all_say_so",),
    ),
    Mutant(
        "ranks may cut their calls into other numbers of parts",
        "moereg/parallel.py",
        old='    said["num_batches"] = num_batches\n',
        new="",
        tests=(f"{_GROUPS}::test_ranks_that_cannot_go_together_all_say_so",),
    ),
    Mutant(
        "ranks call different layers",
        "moereg/prepare_finalize/group.py",
        old="if len(set(numbers)) > 1:",
        new="if False:",
        tests=(f"{_GROUPS}::test_layers_in_another_order_are_an_error_on_every_rank",),
    ),
    Mutant(
        "a rank makes a kernel while another one calls",
        "moereg/agreement.py",
        old="        group.call_together(_NO_LAYER)\n",
        new="",
        tests=(f"{_GROUPS}::test_layers_in_another_order_are_an_error_on_every_rank",),
    ),
    Mutant(
        "ranks number a layer each for itself",
        "moereg/parallel.py",
        old="number = 1 + max(made for _, made in known)",
        new="number = 1 + group.num_layers",
        tests=(f"{_GROUPS}::test_layers_in_another_order_are_an_error_on_every_rank",),
    ),
    Mutant(
        "tokens leave for another layer, though counts said so",
        "moereg/prepare_finalize/all_to_all.py",
        old="        self.group.check_called([pair[0] // STAMP for pair in back])\n",
        new="",
        tests=(f"{_GROUPS}::test_counts_say_which_layer_a_rank_calls",),
    ),
    Mutant(
        "the number of a layer counts as tokens",
        "moereg/kernels/rows/arrived.py",
        old="tokens = tl.load(counts + 2 * ranks, mask=ranks < NUM_RANKS, other=0) & TOKEN_BITS",
        new="tokens = tl.load(counts + 2 * ranks, mask=ranks < NUM_RANKS, other=0)",
        tests=("tests/kernels/test_exchanged.py::test_rows_are_those_of_torch",),
    ),
    Mutant(
        "two threads exchange over one group",
        "moereg/prepare_finalize/group.py",
        old="if not use.lock.acquire(blocking=False):",
        new="if use.lock.acquire(blocking=False) is None:",
        tests=(f"{_GROUPS}::test_a_second_thread_is_refused_before_it_exchanges_anything",),
    ),
    Mutant(
        "a GPU's host waits for the others in each call",
        "moereg/overlap.py",
        old="            moves.has_met = True\n",
        new="",
        tests=(f"{_GROUPS}::test_where_a_host_must_not_wait_a_layer_is_checked_once",),
    ),
    Mutant(
        "calls on a GPU are never checked",
        "moereg/overlap.py",
        old="if not moves.has_met or is_captured",
        new="if is_captured",
        tests=(f"{_GROUPS}::test_where_a_host_must_not_wait_a_layer_is_checked_once",),
    ),
    Mutant(
        "a way with a limit refuses what just keeps it",
        "moereg/facts.py",
        old="if count is None or count > value:",
        new="if count is None or count >= value:",
        tests=("tests/selection/test_movement.py::test_limits_are_served_themselves",),
    ),
    Mutant(
        "an expert with replicas counts as busy as without",
        "moereg/balancing.py",
        old="heapq.heapreplace(busiest, (-loads[expert] / holders[expert], expert))",
        new="heapq.heapreplace(busiest, (-loads[expert], expert))",
        tests=("tests/layer/test_balancing.py::test_a_replica_leaves_an_expert_its_share_of_the_load",),
    ),
    Mutant(
        "tokens that arrive as codes are read as 16 bits",
        "moereg/backends/_triton/quantized_ways.py",
        old="elif arrived.depth == tokens.depth:",
        new="elif True:",
        tests=("tests/backends/test_triton_coded_tokens.py",),
    ),
    Mutant(
        "the second part of a call has the first one's rows",
        "moereg/overlap.py",
        old="return [(Tokens(*(tensor[part] for tensor in tokens)), out[part]) for part in parts]",
        new="return [(Tokens(*(tensor[part] for tensor in tokens)), out[parts[0]]) for part in parts]",
        tests=(_EQUAL,),
    ),
    Mutant(
        "the least scale of rows between ranks is zero",
        "moereg/kernels/rows/rooms.py",
        old="tl.where(exponent == 0, 0x400000, tl.where(",
        new="tl.where(exponent == 0, 0, tl.where(",
        tests=("tests/kernels/test_moved_tokens.py::test_every_exponent_is_the_scale_that_torch_reads",),
    ),
    Mutant(
        "calls may come between the exchange of experts and their writes",
        "moereg/moe_kernel.py",
        old="        with moves.group.alone(MOVING.act):\n",
        new="        if True:\n",
        tests=("tests/groups/test_moves.py::test_a_copy_of_a_kernel_keeps_its_experts",),
    ),
    Mutant(
        "a copy of a layer has the number of the layer",
        "moereg/prepare_finalize/moving.py",
        old="other.layer_number, other.has_met = self.group.copy_layer(self.layer_number), False",
        new="other.has_met = False",
        tests=("tests/groups/test_groups.py::test_layers_in_another_order_are_an_error_on_every_rank",),
    ),
)
