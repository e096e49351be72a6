from ddpdoctor.integrations.watch import Watch as watch  # noqa: N813 - it is written as a function is
from ddpdoctor.model.consistency import ConsistencyError as ConsistencyError
from ddpdoctor.model.consistency import ConsistencyResult as ConsistencyResult
from ddpdoctor.model.consistency import TensorDifference as TensorDifference
from ddpdoctor.probes.consistency.comparing import check_consistency as check_consistency

__version__: str
__all__ = ["ConsistencyError", "ConsistencyResult", "TensorDifference", "check_consistency", "watch"]
