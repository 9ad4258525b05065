"""fairlearn: models under its constraints, their influence on its metrics, and the predictor that GridSearch picks."""

try:
    import fairlearn.reductions  # noqa: F401
    from sklearn.utils.validation import validate_data  # noqa: F401 (since 1.6)
except ImportError as error:
    raise ImportError(
        'dif.adapters.fairlearn needs fairlearn and scikit-learn: pip install "directional-influence[fairlearn]"'
    ) from error

from dif.adapters.fair_models import FairClassifier, FairRegressor
from dif.adapters.grid_search import solution_of

__all__ = ["FairClassifier", "FairRegressor", "solution_of"]
