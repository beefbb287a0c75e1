#!/bin/sh
# Detection: is a backbone worth more to a detector than none? torchvision's Faster R-CNN, fine-tuned twice on your boxes.
# Paper: He et al. 2019, section 4.2, in short: a feature pyramid for C4, hundreds of steps for 24,000, one machine. For the
# published numbers use Detectron2 with the configs that `moco-ray export RUN --to detectron2` writes.
# Hardware: one process; the machine's GPU if there is one, else its CPU. Not yet timed on a GPU.
# Expected: the pre-trained backbone ahead; by how much depends on the images and on --steps. No published number is claimed.
# Needs: pip install 'moco_ray[detection]'
# Command: BACKBONE=runs/mine IMAGES=images ANNOTATIONS=train.json OUTPUT=detection sh jobs/detection.sh
#
#   BACKBONE          a run folder, RUN/checkpoints/step-N.aM.pt, or a .safetensors of ours
#   IMAGES            folder of the images
#   ANNOTATIONS       their boxes, COCO's JSON
#   OUTPUT            folder for detection.json, detection.md and detections.png
#   TEST_IMAGES       optional: folder of the test images (IMAGES)
#   TEST_ANNOTATIONS  optional: their boxes (a fifth of the images is held out)
#   MOCO_RAY          optional: how the command is called here (moco-ray)
#
# Words after the script's name go to the command: sh jobs/detection.sh --steps 2000 --batch-size 16
set -eu

cure="is not set; the first lines of this script tell what it needs"
( : "${BACKBONE:?$cure}" "${IMAGES:?$cure}" "${ANNOTATIONS:?$cure}" "${OUTPUT:?$cure}" ) || exit 2

exec ${MOCO_RAY:-moco-ray} detect "$BACKBONE" --images "$IMAGES" --annotations "$ANNOTATIONS" \
  ${TEST_IMAGES:+--test-images "$TEST_IMAGES"} ${TEST_ANNOTATIONS:+--test-annotations "$TEST_ANNOTATIONS"} \
  --output "$OUTPUT" --steps 1000 --batch-size 8 --image-pixels 480 "$@"
