"""The command line, with replicas on Ray that follow the load within seconds instead of minutes."""

import warnings
from functools import partial

from chrion.cli import main
from chrion.serving.server import ray_serve

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # an interval that Ray will rename
    ray_serve._AVERAGED.update({"look_back_period_s": 2.0, "metrics_interval_s": 0.5})
    ray_serve.AutoscalingSpec = partial(ray_serve.AutoscalingSpec, target=4.0, period_s=0.5, stop_after_s=3.0)
    main()
