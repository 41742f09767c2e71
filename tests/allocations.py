"""The peak of what torch's CPU allocator holds."""

import gc

from torch.profiler import ProfilerActivity, profile


def peak_allocation(work) -> int:
    """Peak bytes of torch's CPU allocator during `work`."""
    gc.collect()  # older tensors must not be freed inside
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    allocated = peak = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        allocated += size
        peak = max(peak, allocated)
    return peak
