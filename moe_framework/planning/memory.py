"""The estimate of a rank's memory: what it keeps between steps, and the fullest moment of a step."""

from dataclasses import dataclass

from moe_framework.planning.job import Job
from moe_framework.planning.moments import Moment, moments
from moe_framework.planning.parameters import (
    BYTES_OF_MASTER,
    BYTES_OF_MOMENTS,
    checkpoint_bytes,
    local_parameters,
    staged_bytes,
)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the rank that has the most of each parameter.

    Attributes:
        dense_parameters: Parameters outside experts that the rank keeps.
        expert_parameters: Those of experts.
        peak: The fullest moment of a step.
        checkpoint: Of a checkpoint on disk, all ranks together.
        staged: Host memory of an asynchronous save, a rank.
    """

    dense_parameters: int
    expert_parameters: int
    peak: Moment
    checkpoint: int
    staged: int

    @property
    def masters(self) -> int:
        """fp32 weights: 4 bytes a parameter."""
        return BYTES_OF_MASTER * (self.dense_parameters + self.expert_parameters)

    @property
    def moments(self) -> int:
        """Adam's two fp32 moments: 8 bytes a parameter."""
        return BYTES_OF_MOMENTS * (self.dense_parameters + self.expert_parameters)

    @property
    def total(self) -> int:
        """The most that torch has allocated at once: without the CUDA context, NCCL and fragmentation."""
        return self.masters + self.moments + self.peak.total


def estimate_memory(job: Job) -> MemoryEstimate:
    """Estimate the memory of a training step: weights, moments, and the largest of `moments.moments`.

    Args:
        job: The run.

    Returns:
        The estimate, in bytes.
    """
    return MemoryEstimate(
        dense_parameters=local_parameters(job, "block", "embedding", "head"),
        expert_parameters=local_parameters(job, "experts"),
        peak=max(moments(job), key=lambda moment: moment.total),
        checkpoint=checkpoint_bytes(job),
        staged=staged_bytes(job),
    )
