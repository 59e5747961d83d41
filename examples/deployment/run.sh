#!/usr/bin/env bash
# Run a complete federation on one machine: a SuperLink and four SuperNodes as separate processes, with TLS and node
# authentication, on PACS with one domain per site. Requires pip install '.[flower]' and ATOLL_DATA.
#
#   ATOLL_DATA=... bash run.sh [FOLDER] [--set key=value ...]
#
# All output is in FOLDER (default: trial); the report is FOLDER/run/report.html.
set -euo pipefail
umask 077 # databases and states hold weights

die() { echo "$1" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)
trial=trial
if [[ $# -gt 0 && $1 != --set ]]; then trial=$1; shift; fi
[[ ${1:-} == --set ]] && shift
sites=(art_painting cartoon photo sketch)
port=${ATOLL_TRIAL_PORT:-9092} # of the SuperLink; the ports of the nodes follow it
mkdir -p "$trial/logs" && trial=$(cd "$trial" && pwd)

export FLWR_HOME=$trial/flwr FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
mkdir -p "$FLWR_HOME"

# 1. Certificates, keys and images.
python "$here/make_keys.py" "$trial/keys" "${sites[@]}"
if [[ ! -d $trial/images ]]; then
  rm -rf "$trial/images.part" # of an export that was interrupted
  python "$here/export_pacs.py" "$trial/images.part" && mv "$trial/images.part" "$trial/images"
fi

# 2. The Flower app, and the address of its SuperLink.
if [[ ! -d $trial/app ]]; then
  atoll federate init "$trial/app" --recipe pacs-ssd-cpu --sites 4 --out "$trial/run" \
    --set train.rounds=3 train.epochs=1 evaluation.every=0 "$@"
elif [[ $# -gt 0 ]]; then
  die "$trial/app has its settings already; choose another FOLDER for --set $*"
fi
cat > "$FLWR_HOME/config.toml" <<CONFIG
[superlink]
default = "trial"

[superlink.trial]
address = "127.0.0.1:$port"
root-certificates = "$trial/keys/ca.crt"
CONFIG

# 3. The SuperLink. It does not install dependencies, and accepts only nodes with registered keys.
processes=()
stop() { kill "${processes[@]}" 2> /dev/null || true; wait 2> /dev/null || true; }
trap stop EXIT
flower-superlink --host 127.0.0.1 --port "$port" --database "$trial/superlink.db" \
  --ssl-ca-certfile "$trial/keys/ca.crt" --ssl-certfile "$trial/keys/server.crt" --ssl-keyfile "$trial/keys/server.key" \
  --enable-supernode-auth --disable-runtime-dependency-installation > "$trial/logs/superlink.log" 2>&1 &
processes+=($!)
register() {
  for _ in $(seq 30); do # the SuperLink takes some seconds to start
    flwr supernode register "$trial/keys/$1.pub" > "$trial/logs/register-$1.log" 2>&1 && return
    grep -q "already in use" "$trial/logs/register-$1.log" && return # from an earlier trial
    sleep 1
  done
  die "the SuperLink did not register $1; $trial/logs/register-$1.log and superlink.log say why"
}
for site in "${sites[@]}"; do register "$site"; done

# 4. The sites. Each node is configured with its name, its image folder and its state folder.
number=0
for site in "${sites[@]}"; do
  number=$((number + 1))
  flower-supernode --superlink "127.0.0.1:$port" --root-certificates "$trial/keys/ca.crt" \
    --auth-supernode-private-key "$trial/keys/$site" --port $((port + 10 + number)) \
    --node-config "site=\"$site\" data=\"$trial/images/$site\" source=\"folder\" state=\"$trial/state/$site\"" \
    > "$trial/logs/$site.log" 2>&1 &
  processes+=($!)
done

# 5. The run.
flwr run "$trial/app" --stream || true
report=$trial/run/report.html
[[ $report -nt $FLWR_HOME/config.toml ]] || die "the run did not end with a report; the log above and $trial/logs say why"
echo "report: $report"
