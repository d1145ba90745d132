// What a simulated collective runs on a GPU (simulated_link.py). WORD is what a thread copies at once,
// in gather and reduce. `ranges` has where the range of each of `count` ranks begins in `full` or
// `whole`, and its words. Rank 0 is us: the own range is first.
__device__ __forceinline__ unsigned long long now() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// Takes the link for `length` from when it is free; returns when that ends.
__device__ __forceinline__ unsigned long long take(unsigned long long* link, int length) {
    unsigned long long seen = *(volatile unsigned long long*)link, start, found;
    while (true) {
        const unsigned long long moment = now();
        start = seen > moment ? seen : moment;
        found = atomicCAS(link, seen, start + length);
        if (found == seen) return start + length;
        seen = found;
    }
}

// The first thread keeps its block until `end`. Each of `waiting` blocks stays as long, with all of
// its threads: the first writes the number of this launch to `over`, which the others read. The last
// to leave clears it, and the count of those that left beside it, for the next replay of a graph.
__device__ __forceinline__ void stay(
    unsigned long long end, volatile int* over, int launch, int waiting
) {
    waiting = min(waiting, (int)gridDim.x);
    if (blockIdx.x >= waiting) return;
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0) {
            while (now() < end) {}
            *over = launch;
        } else {
            while (*over != launch) {}
        }
        if (atomicAdd((int*)over + 1, 1) == waiting - 1) over[0] = over[1] = 0;
    }
    if (waiting > 1) __syncthreads();
}

// Ranks hold the `held` words of `shard`, repeated until their range is full; or zeros, if these are
// none. `period` is a multiple of `held`, and of no fewer threads than there are.
extern "C" __global__ void ncclSimulatedAllGather(
    WORD* full, const WORD* shard, unsigned long long* link, int* over, const long long* ranges,
    int count, int held, int period, int nanoseconds, int launch, int waiting
) {
    const bool watches = blockIdx.x == 0 && threadIdx.x == 0;
    const unsigned long long end = watches && nanoseconds ? take(link, nanoseconds) : 0;
    const unsigned step = gridDim.x * blockDim.x;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < period; i += step) {
        const WORD word = held ? shard[i % held] : 0;
        for (int rank = 0; rank < count; ++rank) {
            WORD* range = full + ranges[2 * rank];
            const long long words = ranges[2 * rank + 1];
            for (long long at = i; at < words; at += period) range[at] = word;
        }
    }
    stay(end, over, launch, waiting);
}

// `period`: the words of the longest range; `held`: of the own.
extern "C" __global__ void ncclSimulatedReduceScatter(
    const WORD* whole, WORD* own, unsigned long long* link, int* over, const long long* ranges,
    int count, int held, int period, int nanoseconds, int launch, int waiting
) {
    const bool watches = blockIdx.x == 0 && threadIdx.x == 0;
    const unsigned long long end = watches && nanoseconds ? take(link, nanoseconds) : 0;
    const unsigned step = gridDim.x * blockDim.x;
    WORD others = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < period; i += step) {
        for (int rank = 1; rank < count; ++rank)
            if (i < ranges[2 * rank + 1]) others ^= whole[ranges[2 * rank] + i];
        if (i < held) own[i] = whole[ranges[0] + i];
    }
    // Never so, which the compiler cannot know: what is read of the others must not be left out.
    if (nanoseconds < 0) own[0] = others;
    stay(end, over, launch, waiting);
}
