//! Checks the sentinels, the primary that they name, and its replicas.

use std::collections::{BTreeMap, BTreeSet};

use leasehold::url::{SentinelSettings, ServerSettings};
use serde_json::{Value, json};

use super::Report;
use super::node::{self, Node, address, joined, query_all, replicas};
use super::redis::{ServerRole, connect, query, why};
use crate::store::Store;

/// With fewer sentinels, the loss of one leaves no majority.
const FEWEST: usize = 3;

type Fields = BTreeMap<String, String>;

pub(super) async fn examine(store: &Store, settings: &SentinelSettings, report: &mut Report) {
    let sentinels = query_sentinels(store, settings).await;
    report_sentinels(&sentinels, report);
    let answers: Vec<_> =
        sentinels.iter().filter_map(|sentinel| sentinel.answer.as_ref().ok()).collect();
    let mut servers: Vec<_> = answers.iter().map(|answer| answer.primary.clone()).collect();
    servers.extend(answers.iter().flat_map(|answer| answer.replicas.iter().cloned()));
    let mut seen = BTreeSet::new();
    servers.retain(|(host, port)| seen.insert(joined(host, *port)));
    let infos: Vec<_> =
        servers.iter().map(|(host, port)| settings.server.at(host, *port)).collect();
    let nodes = query_all(store, &infos, &[]).await;
    let primary = report_primary(&sentinels, &nodes, report);
    let others =
        nodes.iter().filter(|node| primary.is_none_or(|primary| primary.address != node.address));
    let mut facts: Vec<Value> = Vec::new();
    if let Some(primary) = primary {
        let says = format!("primary, {}", replicas(nodes.len() - 1));
        primary.report_primary(&says, report);
        facts.push(primary.as_json(None));
    }
    for replica in others {
        replica.report_replica(primary, report);
        facts.push(replica.as_json(primary));
    }
    if let Some(primary) = primary {
        node::check(store, &[primary], ServerRole::BehindSentinels, report);
    }
    let facts = json!({
        "name": settings.service,
        "quorum": answers.iter().map(|answer| answer.quorum).max(),
        "sentinels": sentinels.iter().map(Sentinel::as_json).collect::<Vec<_>>(),
        "primary": primary.map(|primary| &primary.address),
        "nodes": facts,
    });
    report.servers = Some(("sentinel", facts));
}

/// A sentinel, and its answer or the reason why there is none.
#[derive(Debug)]
struct Sentinel {
    address: String,
    answer: Result<Answer, String>,
}

#[derive(Debug)]
struct Answer {
    /// The host and the port.
    primary: (String, u16),
    /// Whether the sentinel cannot reach the primary.
    is_down: bool,
    quorum: usize,
    replicas: Vec<(String, u16)>,
    others: Vec<(String, u16)>,
}

impl Sentinel {
    fn names(&self) -> Option<String> {
        let (host, port) = &self.answer.as_ref().ok()?.primary;
        Some(joined(host, *port))
    }

    fn as_json(&self) -> Value {
        json!({
            "address": self.address,
            "answers": self.answer.is_ok(),
            "primary": self.names(),
        })
    }
}

/// Queries the sentinels in the URL, and every sentinel that one of them knows.
async fn query_sentinels(store: &Store, settings: &SentinelSettings) -> Vec<Sentinel> {
    let mut sentinels = query_each(store, &settings.sentinels, &settings.service).await;
    let mut others = BTreeMap::new();
    for (info, sentinel) in settings.sentinels.iter().zip(&sentinels) {
        let Ok(answer) = &sentinel.answer else { continue };
        for (host, port) in &answer.others {
            let info = info.at(host, *port);
            if sentinels.iter().all(|sentinel| sentinel.address != address(&info)) {
                others.insert(address(&info), info);
            }
        }
    }
    let others: Vec<_> = others.into_values().collect();
    sentinels.extend(query_each(store, &others, &settings.service).await);
    sentinels
}

async fn query_each(store: &Store, infos: &[ServerSettings], service: &str) -> Vec<Sentinel> {
    let mut queries = tokio::task::JoinSet::new();
    for (at, info) in infos.iter().enumerate() {
        let (client, service) = (store.redis_client(info), service.to_owned());
        queries.spawn(async move {
            let answer = async { query_one(&client?, &service).await };
            (at, answer.await.map_err(|error: redis::RedisError| why(&error)))
        });
    }
    let mut answers: Vec<_> = queries.join_all().await;
    answers.sort_by_key(|(at, _)| *at);
    let sentinel = |(at, answer): (usize, _)| Sentinel { address: address(&infos[at]), answer };
    answers.into_iter().map(sentinel).collect()
}

async fn query_one(client: &redis::Client, service: &str) -> redis::RedisResult<Answer> {
    let mut connection = connect(client).await?;
    let mut question =
        async |word| query::<redis::Value>(&mut connection, &["SENTINEL", word, service]).await;
    let primary: Fields = redis::from_redis_value(question("MASTER").await?)?;
    let replicas: Vec<Fields> = redis::from_redis_value(question("REPLICAS").await?)?;
    let others: Vec<Fields> = redis::from_redis_value(question("SENTINELS").await?)?;
    let addresses = |members: Vec<Fields>| members.iter().filter_map(place).collect();
    let flags = primary.get("flags").map(String::as_str).unwrap_or_default();
    Ok(Answer {
        primary: place(&primary).unwrap_or_default(),
        is_down: flags.split(',').any(|flag| matches!(flag, "s_down" | "o_down")),
        quorum: primary.get("quorum").and_then(|number| number.parse().ok()).unwrap_or_default(),
        replicas: addresses(replicas),
        others: addresses(others),
    })
}

fn place(fields: &Fields) -> Option<(String, u16)> {
    Some((fields.get("ip")?.clone(), fields.get("port")?.parse().ok()?))
}

/// Reports each sentinel, and whether enough of them answer for a failover.
fn report_sentinels(sentinels: &[Sentinel], report: &mut Report) {
    let mut answering = 0;
    let (mut total, mut quorum) = (sentinels.len(), 0);
    for sentinel in sentinels {
        match &sentinel.answer {
            Ok(answer) => {
                answering += 1;
                total = total.max(answer.others.len() + 1);
                quorum = quorum.max(answer.quorum);
                let names = sentinel.names().unwrap_or_default();
                let says = format!("{} names {names} as the primary", sentinel.address);
                if answer.is_down {
                    let says = format!("{says}, and cannot reach it");
                    report.bad("sentinel", says, "start the primary, or wait for the failover");
                } else {
                    report.ok("sentinel", says);
                }
            }
            Err(why) => {
                let says = format!("{} does not answer: {why}", sentinel.address);
                report.warn("sentinel", says, "start it, or correct its address in --store");
            }
        }
    }
    let needed = quorum.max(total / 2 + 1);
    let says =
        format!("{answering} of {total} answer; a failover needs {needed}, the quorum is {quorum}");
    if answering < needed {
        report.bad(
            "quorum",
            says + ": if the primary fails now, no server takes over",
            "start the sentinels that are down; if some were removed for good, run SENTINEL RESET on the others",
        );
    } else if total < FEWEST {
        let says = format!("{says}: if one fails, no failover is possible");
        report.warn("quorum", says, "run at least three, on different machines");
    } else {
        report.ok("quorum", says);
    }
}

/// Returns the primary: the server that the sentinels name and that reports this role. Reports whether the sentinels
/// agree.
fn report_primary<'a>(
    sentinels: &[Sentinel],
    nodes: &'a [Node],
    report: &mut Report,
) -> Option<&'a Node> {
    let named: BTreeSet<_> = sentinels.iter().filter_map(Sentinel::names).collect();
    if named.len() > 1 {
        let named: Vec<_> = named.iter().map(String::as_str).collect();
        report.bad(
            "primary",
            format!("the sentinels disagree: they name {}", named.join(" and ")),
            "wait until a failover has ended; if it stays, see SENTINEL MASTER at each of them",
        );
    }
    let candidates = || nodes.iter().filter(|node| named.contains(&node.address));
    let says_so =
        |node: &&Node| node.facts.as_ref().is_ok_and(|facts| facts.get("role") == Some("master"));
    let primary = candidates().find(says_so).or_else(|| candidates().next());
    if let ([only], Some(_)) = (&named.iter().collect::<Vec<_>>()[..], primary) {
        report.ok("primary", format!("{only}, all sentinels that answer name it"));
    }
    primary
}
