//! Pictures for docs/console.md, of a store that real commands use.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use testkit::redis_server::RedisServer;

use crate::client::{Console, TOKEN};
use crate::support::{Inspector, Running, leasehold, run, until};
use crate::webdriver::Browser;

/// How long the chart is filled with data.
const FILLED: Duration = Duration::from_secs(75);

/// Longer pages are cut at the bottom.
const TALLEST: u32 = 3000;

/// The file name of each picture, the page, its width, and whether it is dark.
const PICTURES: [(&str, &str, u32, bool); 13] = [
    ("semaphores-light-1600", "/", 1600, false),
    ("semaphores-dark-1600", "/", 1600, true),
    ("semaphores-light-360", "/", 360, false),
    ("semaphores-dark-360", "/", 360, true),
    ("semaphore-light-1600", "/semaphore?name=memory", 1600, false),
    ("semaphore-dark-1600", "/semaphore?name=memory", 1600, true),
    ("semaphore-light-360", "/semaphore?name=deploy", 360, false),
    ("locks-light-1600", "/locks", 1600, false),
    ("locks-dark-360", "/locks", 360, true),
    ("pools-light-1600", "/pools", 1600, false),
    ("clients-light-1600", "/clients", 1600, false),
    ("events-dark-1600", "/events?name=build", 1600, true),
    ("events-light-360", "/events?name=build", 360, false),
];

#[test]
#[ignore = "writes docs/console/*.png: scripts/screenshots does it"]
fn pictures_are_taken() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/console");
    std::fs::create_dir_all(&directory).unwrap();
    let server = RedisServer::start();
    let store = server.url();
    let inspector = Inspector::new(&store);
    let demo = Demo::start(&store, &inspector);
    let console = Console::with_token(&store);
    demo.work_for(FILLED);
    for (action, capacity, reason) in
        [("limit", 4, ""), ("pause", 0, "disk full"), ("resume", 0, "")]
    {
        let action =
            json!({ "name": "build", "action": action, "capacity": capacity, "reason": reason });
        assert_eq!(console.act(&action).status, 200);
    }
    let browser = Browser::start();
    browser.go(&console.url("/login"));
    browser.type_into("#token", TOKEN);
    browser.click("main button");
    browser.shows("Log out");
    let save = |name: &str, width: u32| {
        size(&browser, width, 100);
        let height = browser.run("return document.documentElement.scrollHeight");
        let height = u32::try_from(height.as_u64().unwrap()).unwrap();
        size(&browser, width, height.min(TALLEST));
        let wide = browser.run("return document.documentElement.scrollWidth");
        assert!(wide.as_u64() <= Some(u64::from(width)), "{name} is {wide} wide");
        std::fs::write(directory.join(format!("{name}.png")), browser.screenshot()).unwrap();
    };
    for (name, path, width, dark) in PICTURES {
        let scheme = if dark { "dark" } else { "light" };
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        browser.devtools("Emulation.setEmulatedMedia", &json!({ "features": features }));
        size(&browser, width, 900);
        browser.go(&console.url(path));
        save(name, width);
    }
    browser.go(&console.url("/semaphore?name=memory"));
    size(&browser, 360, 740);
    browser.click("td form button");
    browser.shows("more may run than the limit allows");
    std::fs::write(directory.join("confirm-light-360.png"), browser.screenshot()).unwrap();
    server.kill();
    browser.go(&console.url("/semaphore?name=build"));
    size(&browser, 1600, 900);
    browser.shows("Store unreachable since");
    save("outage-light-1600", 1600);
}

fn size(browser: &Browser, width: u32, height: u32) {
    let parameters =
        json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
    browser.devtools("Emulation.setDeviceMetricsOverride", &parameters);
}

/// Names in different states, with holders and waiters.
struct Demo {
    store: String,
    _running: Vec<Running>,
    _held: Vec<Box<dyn std::any::Any>>,
}

impl Demo {
    fn start(store: &str, inspector: &Inspector) -> Self {
        let mut running = Vec::new();
        let mut start = |name: &str, label: &str, options: &[&str]| {
            let mut line = vec!["run", "--label", label];
            line.extend(options);
            line.extend([name, "--", "sleep", "600"]);
            let before = inspector.held_and_waiting(name);
            running.push(Running::start(store, &line));
            until(|| inspector.held_and_waiting(name) != before);
        };
        start("build", "frontend", &["-n", "3"]);
        for label in ["backend", "docs", "packages", "images"] {
            start("build", label, &[]);
        }
        start("memory", "train resnet", &["-n", "64", "--weight", "32"]);
        start("memory", "index", &["--weight", "16"]);
        start("memory", "train bert", &["--weight", "24"]);
        start("memory", "report", &["--weight", "4"]);
        start("deploy", "eu-west", &["-n", "2"]);
        let mut pause = leasehold(store);
        pause.args(["pause", "deploy", "--reason", "release freeze"]).env("USER", "ops");
        assert!(pause.status().unwrap().success());
        start("deploy", "us-east", &[]);
        start("deploy", "ap-south", &[]);
        start("gpu", "nightly-benchmark", &["-n", "4"]);
        assert_eq!(run(store, &["limit", "gpu", "2", "--pin"]).code, 0);
        let rate =
            ["run", "-n", "5", "--rate", "30/1m", "--burst", "5", "payments-api", "--", "true"];
        assert_eq!(run(store, &rate).code, 0);
        start("payments-api", "invoices", &[]);
        start(
            "tenants/acme corp/<b>imports</b>",
            "a long label: import of all customers of March",
            &[],
        );
        for (key, label) in
            [("nightly", "cron"), ("invoice:42", "send-invoice"), ("migrations", "release 3.2")]
        {
            running.push(Running::start(
                store,
                &["lock", "--label", label, key, "--", "sleep", "600"],
            ));
        }
        let mut held: Vec<Box<dyn std::any::Any>> = Vec::new();
        let pool = inspector.client.pool("licences", 5).build().unwrap();
        for instance in ["cad-01", "cad-02", "cad-07"] {
            held.push(Box::new(inspector.block_on(pool.acquire(instance)).unwrap()));
        }
        Self { store: store.to_owned(), _running: running, _held: held }
    }

    /// Starts and ends short jobs for this time.
    fn work_for(&self, time: Duration) {
        let (began, mut jobs) = (Instant::now(), Vec::new());
        while began.elapsed() < time {
            let seconds = fastrand::u32(3..15).to_string();
            let line = ["run", "--label", "test", "-n", "4", "tests", "--", "sleep", &seconds];
            jobs.push(Running::start(&self.store, &line));
            std::thread::sleep(Duration::from_millis(fastrand::u64(500..3000)));
        }
    }
}
