"""The command line, with replicas on Ray that follow the load within seconds instead of minutes."""

import warnings

from chrion.cli import main
from chrion.serving.server import ray_serve

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # an interval that Ray will rename
    seconds = {"look_back_period_s": 2.0, "metrics_interval_s": 0.5, "upscale_delay_s": 0.5, "downscale_delay_s": 3.0}
    ray_serve._FOLLOWING.update(seconds)
    main()
