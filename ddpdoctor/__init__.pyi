from ddpdoctor.model.replicas import ConsistencyError as ConsistencyError
from ddpdoctor.model.replicas import ConsistencyResult as ConsistencyResult
from ddpdoctor.model.replicas import TensorDifference as TensorDifference
from ddpdoctor.probes.consistency.replicas import check_consistency as check_consistency

__version__: str
