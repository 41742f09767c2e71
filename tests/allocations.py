"""The peak of what torch's CPU allocator holds."""

import gc

from torch.autograd.profiler import profile


def peak_allocation(work) -> int:
    """Peak bytes of torch's CPU allocator during `work`."""
    gc.collect()  # older tensors must not be freed inside
    # Not torch.profiler.profile, which makes Python objects of all events at its end: that takes
    # several times longer than the work.
    with profile(profile_memory=True) as profiler:
        work()
    events = profiler.kineto_results.events()
    allocated = peak = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        allocated += size
        peak = max(peak, allocated)
    return peak
