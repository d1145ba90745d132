"""Where a bucket stands between sharded and gathered."""

from __future__ import annotations

from enum import StrEnum


class BucketState(StrEnum):  # states are looked up often, and a string caches its hash
    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


# The allowed changes of state. Any other change is a mistake of the schedule.
ALLOWED = {
    BucketState.SHARDED: {BucketState.GATHERING},
    BucketState.GATHERING: {BucketState.UNSHARDED, BucketState.SHARDED},
    # A bucket is gathered again, in place, if its shard was edited since.
    BucketState.UNSHARDED: {BucketState.GATHERING, BucketState.SHARDED},
}
