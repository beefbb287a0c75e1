"""`python -m moco_ray` is `moco-ray`."""

from moco_ray.cli import main

raise SystemExit(main())
