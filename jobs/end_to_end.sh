#!/bin/sh
# From images to a backbone in one job: pack, pretrain, evaluate, export.
# Paper: He et al. 2019 and Chen et al. 2020 (MoCo v2), by the recipe that you give. Hardware, time, expected: those of the recipe, and packing.
# Command: moco-ray submit --address http://HEAD:8265 --env RECIPE=jobs/moco_v2_imagenet.toml --env IMAGES=s3://bucket/images \
#            --env STORAGE=s3://bucket/work --env NAME=first --env WORKERS=8 jobs/end_to_end.sh
#   or, where the repository is: RECIPE=jobs/moco_v2_imagenet.toml IMAGES=.. STORAGE=.. NAME=first sh jobs/end_to_end.sh
#
#   RECIPE     the recipe's file (moco-ray submit takes it along into the job's folder)
#   IMAGES     what to learn from: a folder or URI, as for pretrain
#   STORAGE    a URI, or a folder that all nodes share. It gets packed/NAME, runs/NAME and backbones/NAME.safetensors
#   NAME       of the run
#   WORKERS    optional: Ray Train workers, 8 or 2:8 (1)
#   BANK, QUERIES  optional, both: labelled images for kNN and a linear classifier
#   SHORT_SIDE optional: images are stored this small, 256 for instance (as they are)
#   MOCO_RAY   optional: how the command is called here (moco-ray)
#
# Stopped, or after the head was lost, the same command goes on: each part knows what it has done. Words after the script's name that
# are overrides (section.key=value) go to pretrain; the name of the recipe's file may stand among them.
set -eu

cure="is not set; the first lines of this script tell what it needs"
( : "${RECIPE:?$cure}" "${IMAGES:?$cure}" "${STORAGE:?$cure}" "${NAME:?$cure}" ) || exit 2
[ -z "${BANK:-}${QUERIES:-}" ] || ( : "${BANK:?goes with QUERIES; set both or neither}" "${QUERIES:?goes with BANK; set both or neither}" ) || exit 2
ray=${MOCO_RAY:-moco-ray}
packed=$STORAGE/packed/$NAME run=$STORAGE/runs/$NAME backbone=$STORAGE/backbones/$NAME.safetensors

for word do # the recipe's own name is no override
  shift
  case $word in *=*) set -- "$@" "$word" ;; esac
done

$ray show-plan "$RECIPE" --data "$IMAGES" --workers "${WORKERS:-1}" "$@" # a mistake in the recipe, the workers or the place of the images is told before hours of packing
$ray pack "$IMAGES" "$packed" ${SHORT_SIDE:+--short-side "$SHORT_SIDE"}
$ray pretrain "$RECIPE" --data "$packed" --storage "$STORAGE/runs" --name "$NAME" --workers "${WORKERS:-1}" "$@"
if [ -n "${BANK:-}" ]; then
  $ray evaluate "$run" --bank "$BANK" --queries "$QUERIES"
fi
exec $ray export "$run" --to safetensors --output "$backbone"
