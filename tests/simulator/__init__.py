"""Hopper's kernels on any machine: what the compiler makes of them, carried out step by step, with every data race found.

The Hopper backend's kernels are five or six warp-specialised partitions that pass tiles on through shared memory, and programs that pass
sums on through global memory. Interpreting their Python would prove little: what matters is who waits for what. So this simulator takes
Triton's own intermediate form of a kernel (TTGIR), with its barriers, copies and products in the order in which the device has them, and

    translate.py      turns it into Python generators, one a partition, that pause wherever the device may wait
    instructions.py   what the instructions compute, on torch tensors
    assembly.py       what inline PTX computes
    machine.py        partitions, barriers, the copy engine, the scheduler: which partition goes on is drawn, and so is when a copy lands
    races.py          every access to shared memory, and to tensors through the copy engine, is checked against those before it
    launch.py         `simulated()`: the backend's host code, on CPU tensors, starts kernels here

An access must come after every conflicting one by way of barriers, counters and waits, not by luck: clocks as of a race detector's go
along with every arrival (races.py), so on the paths that a run takes it finds a missing wait in whatever order things happened. Beyond
that it finds deadlocks, barriers that count wrong, copies of memory that was written without a fence, products used before they are
waited for, and addresses outside of tensors. Orders that lead elsewhere (who takes the first ticket, what a look at a counter shows, a
wait for a phase that the one before the last is taken for) it finds as draws bring them up.

What it does not see: how the warps of one partition lie to each other, but for copies that one thread starts; time; registers.
"""
