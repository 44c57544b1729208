//! The command on Redis, against what a user would write with `redis-cli`, against `etcdctl lock`, and against `flock`
//! on one host.

use std::path::Path;

use super::command::{self, FLOCK, OURS, Tool, hand_offs, stamping_child, take_stamps, wall};
use super::pairs::FEWER;
use super::{BYTES, NANOS};
use crate::bench::Bench;
use crate::etcd_server::EtcdServer;
use crate::sample::{Sample, count};
use crate::wire_log::{Traffic, WireLog};

const OUR_LOCK: &str = "leasehold lock";
const SCRIPT: &str = "redis-cli in a script";
const ETCDCTL: &str = "etcdctl lock";

/// A lock as it is usually written in a shell: `SET NX PX` until it succeeds, the child, and a release that checks the
/// owner. It is neither renewed nor fair.
const REDIS_CLI: &str = r#"
url=$1 name=$2
shift 2
token=$(cat /proc/sys/kernel/random/uuid)
until [ "$(redis-cli -u "$url" SET "$name" "$token" NX PX 30000)" = OK ]; do sleep 0.1; done
"$@"
status=$?
redis-cli -u "$url" EVAL 'if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("DEL", KEYS[1]) end' \
  1 "$name" "$token" >/dev/null
exit $status
"#;

pub(super) fn run(bench: &mut Bench) {
    let folder = tempfile::tempdir().expect("a directory");
    let mut tools = tools(bench, folder.path());
    traffic(bench, &tools, folder.path());
    let mut rounds = 0;
    while bench.again(rounds) {
        rounds += 1;
        bench.step(&format!("start-up, round {rounds}"));
        start_up(bench, &tools, folder.path());
        // A tool that fails is left out from then on, so that rounds stay comparable.
        tools.retain(|(tool, _)| {
            bench.step(&format!("hand-off, {}, round {rounds}", tool.name));
            match hand_offs(tool, folder.path(), bench.window() * 2) {
                Ok(delays) => {
                    add_quantiles(bench, "hand-off", tool.name, &delays);
                    true
                }
                Err(why) => {
                    bench.trouble(tool.name, why);
                    false
                }
            }
        });
    }
    bench.note("consul lock: not measured, because Debian has no package of consul".to_owned());
}

/// The server of a tool.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Server {
    Redis,
    Etcd,
    None,
}

/// Returns the tools that work; the others are reported.
fn tools(bench: &mut Bench, folder: &Path) -> Vec<(Tool, Server)> {
    let (redis, etcd) = (bench.url.clone(), bench.etcd().map(EtcdServer::url));
    let mut there = Vec::new();
    for (name, server) in [
        (OURS, Server::Redis),
        (OUR_LOCK, Server::Redis),
        (SCRIPT, Server::Redis),
        (ETCDCTL, Server::Etcd),
        (FLOCK, Server::None),
    ] {
        let url = if server == Server::Etcd { etcd.clone() } else { Ok(redis.clone()) };
        let working = url.and_then(|url| {
            let tool = tool(name, &url, &bench.name(), folder);
            tool.check(folder).map(|()| tool)
        });
        match working {
            Ok(tool) => there.push((tool, server)),
            Err(why) => bench.trouble(name, why),
        }
    }
    there
}

/// Returns a tool that runs its child under one permit or lock of this name.
fn tool(name: &'static str, url: &str, permit: &str, folder: &Path) -> Tool {
    let ours = command::binary().display().to_string();
    match name {
        OURS => Tool::new(name, &[&ours, "run", "--store", url, "-n", "1", permit, "--"]),
        OUR_LOCK => Tool::new(name, &[&ours, "lock", "--store", url, permit, "--"]),
        SCRIPT => Tool::new(name, &["sh", "-c", REDIS_CLI, "sh", url, permit]),
        ETCDCTL => Tool::new(name, &["etcdctl", "--endpoints", url, "lock", permit]),
        _ => Tool::new(name, &["flock", &folder.join(permit).display().to_string()]),
    }
}

/// Measures the whole run of each tool, in turn, with a child that does nothing.
fn start_up(bench: &mut Bench, tools: &[(Tool, Server)], folder: &Path) {
    let times = if bench.quick { 20 } else { 100 };
    let mut samples = vec![Sample::default(); tools.len()];
    for _ in 0..times {
        for ((tool, _), sample) in tools.iter().zip(&mut samples) {
            sample.0.push(wall(tool.command(folder, &["true"])));
        }
    }
    for ((tool, _), sample) in tools.iter().zip(&samples) {
        add_quantiles(bench, "a child that does nothing", tool.name, sample);
    }
    if bench.quick {
        let note = format!("quick run: a round has {times} starts, so that its p99 is its longest");
        bench.note(note);
    }
}

fn add_quantiles(bench: &mut Bench, what: &str, tool: &str, sample: &Sample) {
    for (measure, share) in [("p50", 0.5), ("p99", 0.99)] {
        bench.add(&format!("{what}, {measure}"), tool, NANOS, sample.quantile(share));
    }
}

/// Counts what each tool sends and receives, once when the server has its scripts, and once when it has not.
fn traffic(bench: &mut Bench, tools: &[(Tool, Server)], folder: &Path) {
    bench.step("traffic");
    for (tool, server) in tools {
        if let Err(why) = traffic_of(bench, tool.name, *server, folder) {
            bench.trouble(tool.name, format!("traffic: {why}"));
        }
    }
    let trips = bench.sample("before the child starts, round trips", OURS);
    bench.report.judge("command/redis/trips", &trips);
}

fn traffic_of(
    bench: &mut Bench,
    name: &'static str,
    server: Server,
    folder: &Path,
) -> Result<(), String> {
    let (port, scheme) = match server {
        Server::Redis => {
            // Of a given server, the port is not known to be on this host.
            let server = bench.server.as_ref().ok_or("only counted on a server of our own")?;
            (server.port(), "redis")
        }
        Server::Etcd => (bench.etcd()?.port(), "http"),
        Server::None => return Ok(()),
    };
    let wire = WireLog::start(port).map_err(|why| why.to_string())?;
    let url = format!("{scheme}://127.0.0.1:{}", wire.port());
    let tool = tool(name, &url, &bench.name(), folder);
    // The first run makes the server ready.
    counted(&tool, &wire, folder)?;
    let (before, all) = counted(&tool, &wire, folder)?;
    let is_redis = server == Server::Redis;
    for (what, traffic) in [("before the child starts", &before), ("in all", &all)] {
        let mut add = |measure: &str, kind, number| {
            bench.add(&format!("{what}, {measure}"), name, kind, count(number));
        };
        add("connections", FEWER, traffic.connections);
        // In HTTP/2 a client need not wait for an answer, so its round trips cannot be told from the outside.
        if is_redis {
            add("round trips", FEWER, traffic.round_trips);
            add("commands", FEWER, traffic.commands);
        }
        add("bytes sent", BYTES, traffic.bytes_to_server);
        add("bytes received", BYTES, traffic.bytes_to_client);
    }
    if !is_redis {
        return Ok(());
    }
    let (begins, rest) = (before.in_order.as_str(), all.in_order.as_str());
    let rest = rest.strip_prefix(begins).unwrap_or(rest).trim_start_matches(" → ");
    bench.note(format!("{name}, before the child starts: {begins}"));
    bench.note(format!("{name}, after that: {rest}"));
    let server = bench.server.as_ref().expect("it was there before");
    let flushed: redis::RedisResult<()> =
        redis::cmd("SCRIPT").arg("FLUSH").query(&mut server.connection());
    flushed.map_err(|why| why.to_string())?;
    let (first, _) = counted(&tool, &wire, folder)?;
    let what = "first run on a server: before the child starts";
    bench.add(&format!("{what}, round trips"), name, FEWER, count(first.round_trips));
    bench.add(&format!("{what}, bytes sent"), name, BYTES, count(first.bytes_to_server));
    Ok(())
}

/// Returns the traffic of one run before the start of its child, and in all.
fn counted(tool: &Tool, wire: &WireLog, folder: &Path) -> Result<(Traffic, Traffic), String> {
    wire.clear();
    let stamps = folder.join("stamps-traffic");
    let child = stamping_child(&stamps, "0")?;
    let words: Vec<_> = child.iter().map(String::as_str).collect();
    let status = tool.command(folder, &words).status().map_err(|why| why.to_string())?;
    if !status.success() {
        return Err(status.to_string());
    }
    let started = take_stamps(&stamps)?.first().ok_or("the child did not run")?.0;
    Ok((wire.before(started), wire.before(u64::MAX)))
}
