//! A store that cannot be reached never looks like contention.

use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::net::{AddressFamily, SocketType, bind, listen, socket};
use rustix::process::{Pid, Signal, kill_process};
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;

use crate::parts::part;
use crate::support::{Inspector, Running, Store, run, until};

/// How much longer than its bound a command may take.
const SLACK: Duration = Duration::from_secs(1);
/// One of this many attempts must stay within the bound. On a busy machine the others may be late.
const ATTEMPTS: usize = 4;

/// Runs commands that must end with 69, all at once, each within its bound.
fn all_unreachable(store: &str) {
    all_end_with(69, store);
}

fn all_end_with(code: i32, store: &str) {
    std::thread::scope(|scope| {
        for kind in ["run", "lock"] {
            for (wait, bound) in [(&["--no-wait"][..], 5), (&["--wait", "2s"], 2)] {
                scope.spawn(move || {
                    let words = [&[kind], wait, &["it", "--", "true"]].concat();
                    let took = std::iter::repeat_with(|| {
                        let begun = Instant::now();
                        let ended = run(store, &words);
                        let took = begun.elapsed();
                        assert_eq!(ended.code, code, "{words:?}: {ended:?}");
                        let waits = |line: &&str| line.starts_with("leasehold: waiting: ");
                        let lines = ended.stderr.lines().skip_while(waits);
                        assert_eq!(lines.count(), 1, "{words:?}: {ended:?}");
                        println!("{words:?} took {took:?}: {}", ended.stderr);
                        took
                    });
                    let mut took = took.take(ATTEMPTS);
                    let limit = Duration::from_secs(bound) + SLACK;
                    assert!(took.any(|took| took < limit), "{words:?} took more than {limit:?}");
                });
            }
        }
    });
}

#[test]
fn a_server_that_hangs_is_69() {
    let server = RedisServer::start();
    server.pause();
    all_unreachable(&server.url());
    server.resume();
}

/// The server hangs after the command has queued.
#[test]
fn a_wait_that_ends_while_the_server_hangs_is_69() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let _held = inspector.hold("it");
    let lock = inspector.client.lock("it").lease(Duration::from_secs(60)).build().unwrap();
    let _locked = inspector.block_on(lock.acquire()).unwrap();
    let waiting = ["run", "lock"].map(|kind| {
        Running::start(&server.url(), &[kind, "-v", "--wait", "4s", "it", "--", "true"])
    });
    until(|| inspector.held_and_waiting("it") == (1, 1));
    for waiting in &waiting {
        waiting.says("waiting for ");
    }
    server.pause();
    let begun = Instant::now();
    let ended = waiting.map(Running::end);
    assert!(begun.elapsed() < Duration::from_secs(6), "they took {:?}", begun.elapsed());
    server.resume();
    for ended in ended {
        assert_eq!(ended.code, 69, "{ended:?}");
    }
}

#[test]
fn an_interrupt_ends_a_command_whose_store_hangs() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let _held = inspector.hold("it");
    let in_the_queue = Running::start(&server.url(), &["run", "it", "--", "true"]);
    until(|| inspector.held_and_waiting("it") == (1, 1));
    server.pause();
    let opening =
        ["run", "lock"].map(|kind| Running::start(&server.url(), &[kind, "it", "--", "true"]));
    let all: Vec<_> = opening.into_iter().chain([in_the_queue]).collect();
    // By then each command has blocked the signal.
    for running in &all {
        until(|| {
            let status =
                std::fs::read_to_string(format!("/proc/{}/status", running.pid().as_raw_pid()))
                    .unwrap();
            let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
            u64::from_str_radix(blocked.trim(), 16).unwrap() & 0b10 != 0
        });
    }
    let begun = Instant::now();
    for running in &all {
        running.signal(Signal::INT);
    }
    for running in all {
        let ended = running.end();
        assert_eq!((ended.code, ended.stderr.as_str()), (130, ""));
    }
    println!("they took {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(3), "they took {:?}", begun.elapsed());
    server.resume();
}

/// Blocks the store, as a process that is stopped in the middle of a transaction does.
fn block(store: &Store) -> File {
    let path = store.url().strip_prefix("sqlite:").unwrap().to_owned();
    let turn = File::open(format!("{path}.clients/turn")).unwrap();
    flock(&turn, FlockOperation::LockExclusive).unwrap();
    turn
}

#[test]
fn a_file_that_is_blocked_is_69() {
    let store = Store::local();
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
    let turn = block(&store);
    all_unreachable(&store.url());
    drop(turn);
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
}

/// A real process, stopped in the middle of a transaction.
#[test]
fn a_file_whose_writer_is_stopped_is_69() {
    let store = Store::local();
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
    let path = store.url().strip_prefix("sqlite:").unwrap().to_owned();
    let directory = tempfile::tempdir().unwrap();
    let ready = directory.path().join("ready");
    let line = part("writer", &[Path::new(&path), &ready]);
    let mut writer = std::process::Command::new(&line[0]).args(&line[1..]).spawn().unwrap();
    until(|| ready.exists());
    kill_process(Pid::from_child(&writer), Signal::STOP).unwrap();
    all_unreachable(&store.url());
    writer.kill().unwrap();
    writer.wait().unwrap();
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
}

/// Nothing answers there, not even with a refusal: the backlog of the socket is full.
#[test]
fn an_address_that_drops_packets_is_69() {
    let listener = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&listener, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    listen(&listener, 0).unwrap();
    let listener = TcpListener::from(listener);
    let address = listener.local_addr().unwrap();
    let brief = Duration::from_millis(200);
    let connections = std::iter::repeat_with(|| TcpStream::connect_timeout(&address, brief));
    let full: Vec<_> = connections.take(20).take_while(Result::is_ok).collect();
    assert!(full.len() < 20, "the queue is not full");
    all_unreachable(&format!("redis://{address}"));
}

/// Waiting does not help.
#[test]
fn a_full_disk_is_69() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().to_str().unwrap();
    let mount = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", disk];
    let mounted = std::process::Command::new("mount").args(mount).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        println!("not tested: mounting a small disk is not permitted");
        return;
    }
    let url = format!("sqlite:{disk}/store.db");
    let mut filler = File::create(directory.path().join("filler")).unwrap();
    while filler.write_all(&[0; 4096]).is_ok() {}
    let checked = std::panic::catch_unwind(|| all_end_with(69, &url));
    drop(filler);
    assert!(std::process::Command::new("umount").args(["-l", disk]).status().unwrap().success());
    if let Err(panic) = checked {
        std::panic::resume_unwind(panic);
    }
}

/// The server runs, and reports why it refuses the connection.
#[test]
fn a_server_that_is_full_is_69_and_quoted() {
    let server = RedisServer::start();
    let mut keeper = server.connection();
    redis::cmd("CONFIG").arg("SET").arg("maxclients").arg(1).exec(&mut keeper).unwrap();
    let ended = run(&server.url(), &["ls"]);
    assert_eq!(ended.code, 69, "{ended:?}");
    let advice = "max number of clients reached: the store cannot be reached: raise its maxclients";
    assert!(ended.stderr.contains(advice), "{ended:?}");
}

#[test]
fn an_outage_during_a_wait_is_reported_and_so_is_its_end() {
    let server = RedisServer::start();
    let url = server.url();
    let inspector = Inspector::new(&url);
    let held = inspector.hold("it");
    let lock = inspector.client.lock("it").lease(Duration::from_secs(600)).build().unwrap();
    let locked = inspector.block_on(lock.acquire()).unwrap();
    let waiting =
        ["run", "lock"].map(|kind| Running::start(&url, &[kind, "-v", "it", "--", "true"]));
    // A command that is still opening its store would fail instead of waiting.
    for waiting in &waiting {
        waiting.says("waiting for");
    }
    server.pause();
    for waiting in &waiting {
        waiting.says("cannot be reached");
    }
    server.resume();
    for waiting in &waiting {
        waiting.says("again");
    }
    assert!(inspector.block_on(held.release()).unwrap());
    assert!(inspector.block_on(locked.release()).unwrap());
    for waiting in waiting {
        let ended = waiting.end();
        assert_eq!(ended.code, 0, "{ended:?}");
        let of_outages = |line: &&str| line.starts_with("leasehold: waiting: ");
        let lines: Vec<_> = ended.stderr.lines().filter(of_outages).collect();
        let [begun, over] = lines[..] else { panic!("two lines: {ended:?}") };
        let cause = begun.strip_prefix(&format!("leasehold: waiting: {url} cannot be reached: "));
        assert!(matches!(cause, Some("connection lost" | "no answer in time")), "{begun}");
        let again = format!("leasehold: waiting: {url} can be reached again, after ");
        assert!(over.starts_with(&again), "{ended:?}");
    }
}

/// The permit is granted as soon as the client has reconnected, perhaps before the command has noticed that.
#[test]
fn an_outage_that_ends_with_a_grant_is_reported_as_ended() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let url = proxy.url();
    let inspector = Inspector::new(&server.url());
    let held = inspector.hold("it");
    let waiting = Running::start(&url, &["run", "it", "--", "true"]);
    until(|| inspector.held_and_waiting("it") == (1, 1));
    proxy.refuse(true);
    proxy.cut();
    waiting.says("\n");
    assert!(inspector.block_on(held.release()).unwrap());
    proxy.heal();
    let ended = waiting.end();
    assert_eq!(ended.code, 0, "{ended:?}");
    let lines: Vec<_> = ended.stderr.lines().collect();
    let [begun, over] = lines[..] else { panic!("two lines: {ended:?}") };
    assert!(
        begun.starts_with(&format!("leasehold: waiting: {url} cannot be reached: ")),
        "{begun}"
    );
    let again = format!("leasehold: waiting: {url} can be reached again, after ");
    assert!(over.starts_with(&again), "{ended:?}");
}

/// With `--wait`, the first connection is tried again.
#[test]
fn a_wait_covers_the_first_connection() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    proxy.refuse(true);
    let waiting = ["run", "lock"]
        .map(|kind| Running::start(&proxy.url(), &[kind, "--wait", "30s", "it", "--", "true"]));
    let endless = Running::start(&proxy.url(), &["run", "it2", "--", "true"]);
    for waiting in &waiting {
        waiting.says("waiting: ");
    }
    let at_once = run(&proxy.url(), &["run", "--no-wait", "it", "--", "true"]);
    assert_eq!(at_once.code, 69, "{at_once:?}");
    proxy.refuse(false);
    for waiting in waiting.into_iter().chain([endless]) {
        let ended = waiting.end();
        assert_eq!(ended.code, 0, "{ended:?}");
    }
}

/// No attempt changes this.
#[test]
fn a_wrong_password_is_77_at_once() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    redis::cmd("CONFIG").arg("SET").arg("requirepass").arg("right").exec(&mut connection).unwrap();
    let url = server.url().replace("redis://", "redis://:wrong@");
    let begun = Instant::now();
    let ended = run(&url, &["run", "--wait", "60s", "it", "--", "true"]);
    assert_eq!(ended.code, 77, "{ended:?}");
    assert!(begun.elapsed() < Duration::from_secs(30));
}

/// Another process is stopped in the middle of a transaction.
#[test]
fn a_file_that_does_not_answer_during_a_wait_is_reported() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let _held = inspector.hold("it");
    let waiting = Running::start(&store.url(), &["run", "--wait", "9s", "it", "--", "true"]);
    until(|| inspector.held_and_waiting("it") == (1, 1));
    let Store::Local(directory) = &store else { unreachable!() };
    let turn = File::open(directory.path().join("store.db.clients/turn")).unwrap();
    flock(&turn, FlockOperation::LockExclusive).unwrap();
    let begun = Instant::now();
    waiting.says("cannot be reached: no answer in time");
    let ended = waiting.end();
    assert_eq!(ended.code, 69, "{ended:?}");
    assert!(begun.elapsed() < Duration::from_secs(12), "it took {:?}", begun.elapsed());
    drop(turn);
}
