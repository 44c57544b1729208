//! The cost of a page with 1,000 names and 10,000 waiters; docs/console.md has the numbers.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use testkit::redis_server::RedisServer;

use crate::client::Console;
use crate::support::Inspector;

const NAMES: usize = 1000;
const WAITERS: usize = 10_000;
/// The name with the long queue, whose page is open.
const LONG: &str = "name-0000";
/// Long enough for several polls, which are rare on a store of this size.
const MEASURED: Duration = Duration::from_secs(30);

#[test]
#[ignore = "measures for four minutes: cargo test --release -p leasehold-cli --test console -- --ignored --nocapture scale::"]
fn a_thousand_names_with_ten_thousand_waiters() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    println!("preparing {NAMES} names with {WAITERS} waiters");
    let (held, waiting) = inspector.block_on(prepare(&inspector.client));
    println!("redis-server without a console: {:.2} % of a core", shares([server.pid()])[0]);
    println!("a poll costs redis-server {:?} of a core", cost_of_a_poll(&server, &inspector));
    let console = Console::start(&server.url());
    let overview = console.json("/api/overview");
    println!("one poll takes {} s; {} wait", overview["read_took_seconds"], overview["waiting"]);
    let long = format!("/semaphore?name={LONG}");
    for path in ["/?", "/?page=3", &*long, "/clients?", "/metrics?", "/api/semaphores?"] {
        // A new address is not answered from the cache. The head of a queue is read from the store.
        let times: Vec<_> =
            (0..5).map(|number| answer(&console, &format!("{path}&{number}"))).collect();
        println!("{path}: {times:.0?}");
    }
    let mut browsers = Vec::new();
    for (count, path) in [(1, "/"), (10, "/"), (1, LONG), (10, LONG)] {
        let path = if path == LONG { format!("/semaphore?name={LONG}") } else { path.to_owned() };
        browsers.clear();
        for _ in 0..count {
            browsers.push(Watching::start(&console, &path));
        }
        let (before, console_share) =
            (polls(&console), console.running.pid().as_raw_pid().cast_unsigned());
        let [redis, console_share] = shares([server.pid(), console_share]);
        let polls = polls(&console) - before;
        println!(
            "{count} browsers on {path}: redis-server {redis:.2} % of a core, {polls} polls in {MEASURED:?}, console {console_share:.2} %"
        );
    }
    println!("the console uses {} KiB", console.memory());
    drop((browsers, held, waiting));
}

/// Adds one holder and some waiters to each name; one name has a tenth of all waiters.
async fn prepare(
    client: &leasehold::Client,
) -> (Vec<leasehold::Permit>, Vec<tokio::task::JoinHandle<()>>) {
    let (mut held, mut waiting) = (Vec::new(), Vec::new());
    for number in 0..NAMES {
        let semaphore =
            client.semaphore(&format!("name-{number:04}"), 1).label("scale").build().unwrap();
        held.push(semaphore.acquire().await.unwrap());
        let waiters = if number == 0 { WAITERS - 9 * (NAMES - 1) } else { 9 };
        for _ in 0..waiters {
            let semaphore = semaphore.clone();
            waiting.push(tokio::spawn(async move {
                let _ = semaphore.acquire().await;
            }));
        }
        tokio::task::yield_now().await;
    }
    loop {
        let all = client.stats().limit(NAMES).await.unwrap();
        if all.iter().map(|one| one.waiting).sum::<usize>() == waiting.len() {
            break;
        }
    }
    (held, waiting)
}

fn answer(console: &Console, path: &str) -> Duration {
    let began = Instant::now();
    assert_eq!(console.get(path).status, 200);
    began.elapsed()
}

fn polls(console: &Console) -> u64 {
    let metrics = console.get("/metrics").body;
    let line = metrics.lines().find_map(|line| line.strip_prefix("leasehold_store_polls_total "));
    line.unwrap().parse().unwrap()
}

/// Returns the CPU time that the server spends on one poll, without that of the waiters.
fn cost_of_a_poll(server: &RedisServer, inspector: &Inspector) -> Duration {
    let (before, began) = (ticks(server.pid()), Instant::now());
    for _ in 0..10 {
        let query = inspector.client.stats().unused().limit(10_000);
        assert_eq!(inspector.block_on(query).unwrap().len(), NAMES);
    }
    let (spent, took) = (ticks(server.pid()) - before, began.elapsed());
    let before = ticks(server.pid());
    std::thread::sleep(took);
    let others = ticks(server.pid()) - before;
    Duration::from_secs_f64(((spent - others) / 1000.0).max(0.0))
}

/// Returns the CPU time that a process has used, in hundredths of a second, as Linux counts it.
fn ticks(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(") ").unwrap();
    let fields: Vec<_> = rest.split(' ').collect();
    fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()
}

/// Returns how busy processes are, in percent of one core.
fn shares<const N: usize>(pids: [u32; N]) -> [f64; N] {
    let (before, began) = (pids.map(ticks), Instant::now());
    std::thread::sleep(MEASURED);
    let after = pids.map(ticks);
    std::array::from_fn(|at| (after[at] - before[at]) / began.elapsed().as_secs_f64())
}

/// Does what the script of a page does: reads the stream, and fetches the page after each event.
struct Watching(TcpStream);

impl Watching {
    fn start(console: &Console, path: &str) -> Self {
        let mut stream = console.connect();
        let host = format!("Host: 127.0.0.1:{}", console.port);
        stream.write_all(format!("GET /live HTTP/1.1\r\n{host}\r\n\r\n").as_bytes()).unwrap();
        let (mut reading, port, path) =
            (stream.try_clone().unwrap(), console.port, path.to_owned());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = std::io::Read::read(&mut reading, &mut bytes) {
                if !String::from_utf8_lossy(&bytes[..read]).contains("event: version") {
                    continue;
                }
                let Ok(mut page) = TcpStream::connect(("127.0.0.1", port)) else { return };
                let request = format!(
                    "GET {path} HTTP/1.1\r\n{host}\r\nleasehold-fragment: 1\r\nConnection: close\r\n\r\n"
                );
                let _ = page.write_all(request.as_bytes());
                let _ = std::io::copy(&mut page, &mut std::io::sink());
            }
        });
        Self(stream)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}
