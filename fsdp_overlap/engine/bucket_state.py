"""Where a bucket stands between sharded and gathered."""

from __future__ import annotations

from enum import StrEnum


class BucketState(StrEnum):
    """What changes it, and to what:

    =========  =========  =========  =======
    state      a gather   a wait     freeing
    =========  =========  =========  =======
    sharded    gathering  sharded    raises
    gathering  gathering  unsharded  sharded
    unsharded  gathering  unsharded  sharded
    =========  =========  =========  =======

    A gather of a bucket that is gathering waits first. One that is unsharded is gathered again, in
    place, if its shard was edited since.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
