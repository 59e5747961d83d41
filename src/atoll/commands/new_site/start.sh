#!/usr/bin/env bash
# Start the node of the site SITE. It waits for the coordinator's work, and reconnects by itself.
set -euo pipefail
umask 077 # states hold weights

# Fill in:
coordinator=""  # HOST:PORT of the coordinator's SuperLink, such as federation.example.org:9092
images=""       # the folder of images, with an absolute path
source="images" # "folder" if there is a folder for each class
site="SITE"     # the permanent name of this site; keep it

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PATH="ENVIRONMENT:$PATH" # where Atoll and Flower are installed
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_HOME="$here/state/flower" ATOLL_CACHE="$here/state/cache"

die() { echo "$1" >&2; exit 2; }
[[ -n $coordinator && -n $images ]] || die "fill in coordinator and images at the top of $here/start.sh"
[[ -d $images ]] || die "there is no folder $images; change images at the top of $here/start.sh"
for file in atoll-node ca.crt policy.toml; do
  [[ -r $here/$file ]] || die "cannot read $here/$file; $here/README.md says where it comes from"
done
command -v flower-supernode > /dev/null || die "flower-supernode is missing; install Atoll with its extra 'flower'"
mkdir -p "$FLWR_HOME"

exec flower-supernode \
  --superlink "$coordinator" --root-certificates "$here/ca.crt" --auth-supernode-private-key "$here/atoll-node" \
  --node-config "site=\"$site\" data=\"$images\" source=\"$source\" state=\"$here/state\" policy=\"$here/policy.toml\""
