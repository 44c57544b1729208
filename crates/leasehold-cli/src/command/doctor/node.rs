//! Queries several servers, and merges findings that are the same on all of them.

use leasehold::url::ServerSettings;
use redis::FromRedisValue;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::redis::{Facts, ServerRole, why};
use super::{Finding, Report, SLOW};
use crate::store::Store;

/// A server, and its facts or the reason why there are none.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) server: ServerSettings,
    pub(super) address: String,
    pub(super) facts: Result<Facts, String>,
}

/// Queries all of these servers at once. The result has the same order.
pub(super) async fn query_all(
    store: &Store,
    servers: &[ServerSettings],
    more: &'static [&'static [&'static str]],
) -> Vec<Node> {
    let mut queries = JoinSet::new();
    for (at, server) in servers.iter().enumerate() {
        let (client, channel) = (store.redis_client(server), store.trial_channel());
        queries.spawn(async move {
            match client {
                Ok(client) => (at, Facts::query(client, &channel, more).await),
                Err(error) => (at, Err(why(&error))),
            }
        });
    }
    let mut answers: Vec<_> = servers.iter().map(|_| None).collect();
    while let Some(answer) = queries.join_next().await {
        if let Ok((at, facts)) = answer {
            answers[at] = Some(facts);
        }
    }
    let node = |(server, facts): (&ServerSettings, Option<_>)| Node {
        server: server.clone(),
        address: address(server),
        facts: facts.unwrap_or_else(|| Err("no answer".to_owned())),
    };
    servers.iter().zip(answers).map(node).collect()
}

/// Returns the address of a server as text.
pub(super) fn address(server: &ServerSettings) -> String {
    let (host, port) = server.host_and_port();
    joined(&host, port)
}

pub(super) fn joined(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

pub(super) fn replicas(count: usize) -> String {
    if count == 1 { "1 replica".to_owned() } else { format!("{count} replicas") }
}

impl Node {
    /// Returns the answer to an additional question, by its index.
    pub(super) fn answer<T: FromRedisValue>(&self, question: usize) -> Option<T> {
        let answer = self.facts.as_ref().ok()?.more.get(question)?.clone();
        redis::from_redis_value(answer).ok()
    }

    /// Reports a primary. `says` describes it in addition to its address and round trip.
    pub(super) fn report_primary(&self, says: &str, report: &mut Report) {
        let facts = match &self.facts {
            Ok(facts) => facts,
            Err(why) => {
                let says = format!("{} {says}, does not answer: {why}", self.address);
                report.bad("node", says, "start it, or see its log");
                return;
            }
        };
        let says = format!("{} {says}, answers in {:.1?}", self.address, facts.round_trip);
        if facts.round_trip < SLOW {
            report.ok("node", says);
        } else {
            report.warn("node", says, "use servers closer to this host");
        }
    }

    /// Reports a replica of `primary`, if that is known.
    pub(super) fn report_replica(&self, primary: Option<&Self>, report: &mut Report) {
        let of = primary.map_or("an unknown primary", |primary| &primary.address);
        let says = format!("{} replica of {of}", self.address);
        let facts = match &self.facts {
            Ok(facts) => facts,
            Err(why) => {
                let says = format!("{says}, does not answer: {why}");
                report.warn("node", says, "start it: until then it cannot take over");
                return;
            }
        };
        let behind = self.behind(primary).map(|bytes| format!(", {bytes} bytes behind"));
        match facts.get("master_link_status") {
            Some("up") => {
                report.ok("node", format!("{says}, link up{}", behind.unwrap_or_default()));
            }
            Some(link) => {
                let says = format!("{says}, link {link}");
                report.warn(
                    "node",
                    says,
                    "the replica receives no new leases; if it was not just started, see its log",
                );
            }
            None => report.ok("node", says),
        }
        let Some(Ok(primary)) = primary.map(|primary| &primary.facts) else { return };
        for (setting, value, other) in facts.settings.differences(&primary.settings) {
            let says = format!("{} has {setting} {value}, and its primary {other}", self.address);
            let advice = "give all servers the same settings: a failover changes them otherwise";
            report.warn("settings", says, advice);
        }
    }

    /// Returns how many bytes of its primary's replication stream a replica has not received yet.
    fn behind(&self, primary: Option<&Self>) -> Option<u64> {
        let number = |node: &Self, key| node.facts.as_ref().ok()?.get(key)?.parse::<u64>().ok();
        // The two were not queried at exactly the same time.
        let written = number(primary?, "master_repl_offset")?;
        Some(written.saturating_sub(number(self, "slave_repl_offset")?))
    }

    /// Returns the facts for `--json`.
    pub(super) fn as_json(&self, primary: Option<&Self>) -> Value {
        let facts = self.facts.as_ref().ok();
        json!({
            "address": self.address,
            "answers": facts.is_some(),
            "round_trip_us": facts.map(|facts| facts.round_trip.as_secs_f64() * 1e6),
            "primary": primary.map(|primary| &primary.address),
            "link": facts.and_then(|facts| facts.get("master_link_status")),
            "bytes_behind": self.behind(primary),
        })
    }
}

/// Reports the checks of these primaries. A finding that is the same on all of them is reported once.
pub(super) fn check(store: &Store, primaries: &[&Node], place: ServerRole, report: &mut Report) {
    let findings = |node: &&Node| {
        let mut node_report = Report::new(store);
        if let Ok(facts) = &node.facts {
            facts.check(place, &mut node_report);
        }
        (node.address.clone(), node_report.findings)
    };
    let all: Vec<_> =
        primaries.iter().map(findings).filter(|(_, node_report)| !node_report.is_empty()).collect();
    report.findings.extend(merge(&all));
}

/// Merges equal findings of several servers, and adds the addresses unless all servers have the finding.
fn merge(all: &[(String, Vec<Finding>)]) -> Vec<Finding> {
    let mut groups: Vec<(&Finding, Vec<&str>)> = Vec::new();
    for (address, findings) in all {
        for finding in findings {
            match groups.iter_mut().find(|(group, _)| *group == finding) {
                Some((_, addresses)) => addresses.push(address),
                None => groups.push((finding, vec![address])),
            }
        }
    }
    // Findings of one check stay together, in the order of the checks.
    let order = |check| {
        all.iter().find_map(|(_, findings)| findings.iter().position(|one| one.check == check))
    };
    groups.sort_by_key(|(finding, _)| order(finding.check));
    let merged = |(finding, addresses): (&Finding, Vec<&str>)| {
        let mut finding = finding.clone();
        if addresses.len() < all.len() {
            finding.says = format!("{} ({})", finding.says, addresses.join(", "));
        }
        finding
    };
    groups.into_iter().map(merged).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn findings_of_all_servers_are_reported_once() {
        let finding = |check, says: &str| Finding {
            check,
            verdict: Verdict::Ok,
            says: says.to_owned(),
            advice: None,
        };
        let findings = |policy| vec![finding("version", "Redis 7"), finding("memory", policy)];
        let all = [("a", "noeviction"), ("b", "lru"), ("c", "noeviction")]
            .map(|(address, policy)| (address.to_owned(), findings(policy)));
        let says: Vec<_> = merge(&all).into_iter().map(|finding| finding.says).collect();
        assert_eq!(says, ["Redis 7", "noeviction (a, c)", "lru (b)"]);
    }
}
