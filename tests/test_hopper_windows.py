"""The Hopper forward's way with windows, on a machine without a GPU: the kernel's arithmetic run as Python, what the host decides, what is
built ahead."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import make_case, needs_triton

from gdpa.problem import window_mask


@needs_triton
class TestWindows:
    """forward.find_blocks, and what the host says of windows; the kernel's own arithmetic, run as Python."""

    @staticmethod
    def find_blocks(*arguments):
        from gdpa.backends.hopper import forward

        gl = SimpleNamespace(constexpr=None, minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b))
        namespace = {"gl": gl, "ROWS": 64, "NO_WINDOW": forward.NO_WINDOW.value, "BOTH": forward.BOTH.value}
        exec(inspect.getsource(forward.find_blocks.fn).replace("@gluon.jit\n", ""), namespace)
        return namespace["find_blocks"](*arguments)

    @pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (-1, 128), (0, 0), (100, 0), (3, 200), (128, -1), (5000, 5000)])
    @pytest.mark.parametrize(("queries", "keys"), [(300, 300), (300, 130), (130, 700), (1, 129), (640, 640), (200, 0)])
    def test_blocks_are_those_that_a_row_of_the_tile_sees(self, queries, keys, window):
        from gdpa.backends.hopper import forward

        kind = forward.NO_WINDOW if max(window) < 0 else forward.RIGHT if window[0] < 0 else forward.BOTH
        sides = [side if side >= 0 else forward.UNBOUNDED.value for side in window]
        for row in range(0, queries, 128):
            first, blocks, none = self.find_blocks(row, queries, keys, *sides, 128, kind.value, 2)
            seen = window_mask(queries, keys, window, torch.device("cpu"))[row : row + 128].any(0).nonzero().flatten() // 128
            assert none == (seen.numel() == 0)
            assert blocks >= 1
            if not none:
                assert (first, first + blocks - 1) == (seen.min().item(), seen.max().item())
                if kind == forward.RIGHT and (keys - queries + sides[1]) % 128 == 0:
                    # All rows of the tile see all keys of all blocks but the last, to the sequence's end.
                    rows = window_mask(queries, keys, window, torch.device("cpu"))[row : row + 128]
                    assert rows[:, first * 128 : (first + blocks - 1) * 128].all()

    @pytest.mark.parametrize("window", [(-1, 0), (-1, 128), (-1, 70), (0, 0), (100, 0), (3, 200), (128, -1), (5000, 5000)])
    @pytest.mark.parametrize(("queries", "keys"), [(300, 300), (300, 172), (300, 130), (130, 700), (1, 129), (640, 640), (513, 1)])
    def test_the_pairs_that_pass_the_masks_are_the_windows(self, queries, keys, window):
        """What the consumers do with each block, as the kernel says it: masked by first and last key, from right to left or not."""
        from gdpa.backends.hopper import forward

        on_edge = window[0] < 0 and (keys - queries + window[1]) % 128 == 0
        kind = forward.RIGHT if on_edge else forward.BOTH
        left, right = (side if side >= 0 else forward.UNBOUNDED.value for side in window)
        pairs = torch.zeros(queries, keys, dtype=torch.int32)
        for row in range(0, queries, 64):
            first, blocks, none = self.find_blocks(row // 128 * 128, queries, keys, left, right, 128, kind.value, 2)
            if none:
                continue
            for i in range(blocks):
                block = first + (blocks - 1 - i if kind == forward.RIGHT else i)
                keys_left = keys - block * 128
                own = keys_left - queries + row
                for r in range(min(64, queries - row)):
                    last = 127 if kind == forward.RIGHT and i > 0 else r + own + right
                    begin = r + own - left if kind == forward.BOTH else 0
                    stop = min(last + 1, 128, keys_left)
                    pairs[row + r, block * 128 + max(begin, 0) : block * 128 + max(stop, 0)] += 1
        assert torch.equal(pairs, window_mask(queries, keys, window, torch.device("cpu")).int())

    @pytest.mark.parametrize(
        ("form", "options", "same", "kind"),
        [
            ("dense", {}, False, "NO_WINDOW"),
            ("dense", {"causal": True}, False, "RIGHT"),
            ("dense", {"window_size": (-1, 128)}, False, "RIGHT"),
            ("dense", {"window_size": (-1, 100)}, False, "BOTH"),
            ("dense", {"causal": True, "k_lengths": (172, 172)}, False, "RIGHT"),
            ("dense", {"causal": True, "k_lengths": (301, 301)}, False, "BOTH"),
            ("dense", {"window_size": (10, 0)}, False, "BOTH"),
            ("packed", {"causal": True}, True, "RIGHT"),
            ("packed", {"causal": True}, False, "BOTH"),
            ("packed", {"window_size": (-1, 28), "tail": (0, 100)}, True, "BOTH"),
            ("packed", {"causal": True, "tail": (0, 100)}, True, "RIGHT"),
            ("dense-key", {"causal": True}, False, "BOTH"),
        ],
    )
    def test_the_kernels_way_with_windows(self, form, options, same, kind):
        from gdpa.backends.hopper import forward, plan, plan_forward

        case = make_case(form, **{"q_lengths": (300, 300), "heads": 4, "head_dim": 64, **options})
        k_offsets = case.inputs.cu_seqlens_q if same else case.inputs.cu_seqlens_k
        same_offsets = plan.same_offsets(case.inputs.cu_seqlens_q, k_offsets)
        assert same_offsets == same
        assert plan_forward.way_of_window(case.problem, same_offsets) == getattr(forward, kind).value
        assert plan_forward.consumers(case.problem) == 2


@needs_triton
@pytest.mark.parametrize("group", [1, 2])
def test_precompile_builds_causal_kernels_where_asked_to(group, monkeypatch):
    from gdpa import schedule_kernels
    from gdpa.backends.hopper import launch, launch_backward

    built: list[tuple[str, str, tuple[int, int]]] = []
    lists: list[int] = []
    monkeypatch.setattr(schedule_kernels, "compiled", lambda block: lists.append(block) or ())

    def compiled(which: str) -> Any:
        def compile_it(activations, head_dim, dtype, group, form, kv_heads, rows, window=(-1, -1), queries=None):
            built.append((which, form, window))
            return SimpleNamespace(metadata=SimpleNamespace(num_warps=4, shared=1024), hash=len(built))

        return compile_it

    monkeypatch.setattr(launch, "compile_forward", compiled("forward"))
    monkeypatch.setattr(launch_backward, "compile_backward", compiled("backward"))
    for masked in (False, True):
        built.clear()
        lines = [line for x in (launch, launch_backward) for line in x.precompile(("silu",), 128, torch.bfloat16, masked, group, 4)]
        assert lists == ([256] if masked and group == 1 else [])  # of two tiles each
        assert len(lines) == len(built) + len(lists)
        assert {window for _, _, window in built} == ({(-1, 0), (1, 0)} if masked else {(-1, -1)})
        forms = {form for which, form, _ in built if which == "backward"}
        assert len(forms) == (4 if not masked else 2 if group == 1 else 0)
        assert all(("causal" in line or "window" in line) == masked for line in lines)
