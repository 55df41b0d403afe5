from typing import Any

ContinuousBatchingConfig: Any
