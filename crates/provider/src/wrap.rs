//! What every provider gets around it, whoever wrote it: a concurrency limit, a deadline, a span
//! and metrics. Applied once, where the program is put together: see [`wrap`].

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use egress_core::{ErrorClass, InstanceName, ProviderId, Uid};
use futures::stream::BoxStream;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::field::Empty;
use tracing::{Instrument, Span};

use crate::contract::{CreateRequest, Instance, InstanceEvent, Operation, Provider, ProviderError};
use crate::metrics::{Metrics, OperationLabels, ProviderLabels, RequestLabels};

/// Limits of one provider.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Calls at a time; more wait their turn. At least 1.
    pub concurrency: usize,
    /// A call that takes longer is given up as Transient. The wait for a turn does not count.
    pub deadline: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            concurrency: 8,
            deadline: Duration::from_secs(120),
        }
    }
}

/// The usual order: the wait for a turn is outside of the span and of the measured duration, so
/// that both tell of the backend alone.
pub fn wrap(inner: Arc<dyn Provider>, limits: Limits, metrics: &Metrics) -> Arc<dyn Provider> {
    let metered = Metered::new(Deadline::new(inner, limits.deadline), metrics.clone());
    Arc::new(Limited::new(
        Traced::new(metered),
        limits.concurrency,
        metrics,
    ))
}

/// The calls of the trait, each passed through `self.around(operation, id, call)`.
macro_rules! delegate {
    ($wrapper:ident) => {
        #[async_trait]
        impl<P: Provider> Provider for $wrapper<P> {
            fn name(&self) -> &str {
                self.inner.name()
            }

            fn kind(&self) -> &'static str {
                self.inner.kind()
            }

            async fn create(&self, request: &CreateRequest) -> Result<ProviderId, ProviderError> {
                let name = request.name.as_str();
                self.around("create", Some(name), self.inner.create(request))
                    .await
            }

            async fn get(&self, id: &ProviderId) -> Result<Instance, ProviderError> {
                self.around("get", Some(id.as_str()), self.inner.get(id))
                    .await
            }

            async fn delete(&self, id: &ProviderId) -> Result<(), ProviderError> {
                self.around("delete", Some(id.as_str()), self.inner.delete(id))
                    .await
            }

            async fn list(&self) -> Result<Vec<Instance>, ProviderError> {
                self.around("list", None, self.inner.list()).await
            }

            fn events(&self) -> BoxStream<'static, InstanceEvent> {
                self.inner.events()
            }

            async fn find(&self, name: &InstanceName) -> Result<Option<Instance>, ProviderError> {
                self.around("find", Some(name.as_str()), self.inner.find(name))
                    .await
            }

            async fn collect_garbage(
                &self,
                live: &BTreeSet<Uid>,
                grace: Duration,
            ) -> Result<Vec<String>, ProviderError> {
                self.around(
                    "collect_garbage",
                    None,
                    self.inner.collect_garbage(live, grace),
                )
                .await
            }
        }
    };
}

#[async_trait]
impl Provider for Arc<dyn Provider> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn kind(&self) -> &'static str {
        (**self).kind()
    }

    async fn create(&self, request: &CreateRequest) -> Result<ProviderId, ProviderError> {
        (**self).create(request).await
    }

    async fn get(&self, id: &ProviderId) -> Result<Instance, ProviderError> {
        (**self).get(id).await
    }

    async fn delete(&self, id: &ProviderId) -> Result<(), ProviderError> {
        (**self).delete(id).await
    }

    async fn list(&self) -> Result<Vec<Instance>, ProviderError> {
        (**self).list().await
    }

    fn events(&self) -> BoxStream<'static, InstanceEvent> {
        (**self).events()
    }

    async fn find(&self, name: &InstanceName) -> Result<Option<Instance>, ProviderError> {
        (**self).find(name).await
    }

    async fn collect_garbage(
        &self,
        live: &BTreeSet<Uid>,
        grace: Duration,
    ) -> Result<Vec<String>, ProviderError> {
        (**self).collect_garbage(live, grace).await
    }
}

fn result_of<T>(answer: &Result<T, ProviderError>) -> &'static str {
    match answer {
        Ok(_) => "success",
        Err(error) => error.class.as_str(),
    }
}

/// Counts and times each call.
pub struct Metered<P> {
    inner: P,
    metrics: Metrics,
}

impl<P: Provider> Metered<P> {
    pub fn new(inner: P, metrics: Metrics) -> Self {
        Self { inner, metrics }
    }

    async fn around<T>(
        &self,
        operation: &'static str,
        _id: Option<&str>,
        call: impl Future<Output = Result<T, ProviderError>> + Send,
    ) -> Result<T, ProviderError> {
        let provider = self.inner.name().to_owned();
        let in_flight = Held::of(
            &self.metrics.in_flight.get_or_create_owned(&ProviderLabels {
                provider: provider.clone(),
            }),
        );
        let started = Instant::now();
        let answer = call.await;
        drop(in_flight);
        self.metrics
            .duration
            .get_or_create(&OperationLabels {
                provider: provider.clone(),
                operation,
            })
            .observe(started.elapsed().as_secs_f64());
        self.metrics
            .requests
            .get_or_create(&RequestLabels {
                provider,
                operation,
                result: result_of(&answer),
            })
            .inc();
        answer
    }
}

delegate!(Metered);

/// A gauge that counts while this lives, also when the call is dropped.
struct Held(Gauge);

impl Held {
    fn of(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// A client span around each call. NotFound is a normal answer, not an error status.
pub struct Traced<P> {
    inner: P,
}

impl<P: Provider> Traced<P> {
    pub fn new(inner: P) -> Self {
        Self { inner }
    }

    fn span(&self, operation: &'static str, id: Option<&str>) -> Span {
        // The name of a span is part of its static description, so each has a line of its own.
        macro_rules! client_span {
            ($name:literal) => {
                tracing::info_span!(
                    $name,
                    otel.kind = "client",
                    otel.status_code = Empty,
                    otel.status_description = Empty,
                    PROVIDER = self.inner.name(),
                    provider.name = self.inner.name(),
                    provider.id = id,
                    provider.result = Empty,
                )
            };
        }
        match operation {
            "create" => client_span!("provider.create"),
            "get" => client_span!("provider.get"),
            "delete" => client_span!("provider.delete"),
            "list" => client_span!("provider.list"),
            "find" => client_span!("provider.find"),
            _ => client_span!("provider.collect_garbage"),
        }
    }

    async fn around<T>(
        &self,
        operation: &'static str,
        id: Option<&str>,
        call: impl Future<Output = Result<T, ProviderError>> + Send,
    ) -> Result<T, ProviderError> {
        let span = self.span(operation, id);
        let answer = call.instrument(span.clone()).await;
        span.record("provider.result", result_of(&answer));
        if let Err(error) = &answer
            && error.class != ErrorClass::NotFound
        {
            span.record("otel.status_code", "ERROR");
            span.record("otel.status_description", error.message.as_str());
            span.in_scope(|| tracing::debug!(class = %error.class, "{error}"));
        }
        answer
    }
}

delegate!(Traced);

/// At most so many calls at a time: a slow backend holds up its own Proxies and nobody else's.
pub struct Limited<P> {
    inner: P,
    turns: Semaphore,
    metrics: Metrics,
}

impl<P: Provider> Limited<P> {
    pub fn new(inner: P, concurrency: usize, metrics: &Metrics) -> Self {
        Self {
            inner,
            turns: Semaphore::new(concurrency.clamp(1, Semaphore::MAX_PERMITS)),
            metrics: metrics.clone(),
        }
    }

    async fn around<T>(
        &self,
        _operation: &'static str,
        _id: Option<&str>,
        call: impl Future<Output = Result<T, ProviderError>> + Send,
    ) -> Result<T, ProviderError> {
        // An error means closed, and nobody closes it: going on without a turn is then right too.
        let _turn = match self.turns.try_acquire() {
            Ok(turn) => Ok(turn),
            Err(_) => {
                let labels = ProviderLabels {
                    provider: self.inner.name().to_owned(),
                };
                let _waiting = Held::of(&self.metrics.waiting.get_or_create_owned(&labels));
                self.turns.acquire().await
            }
        };
        call.await
    }
}

delegate!(Limited);

/// A call that hangs is given up: Transient, and idempotence makes the repeat harmless.
pub struct Deadline<P> {
    inner: P,
    limit: Duration,
}

impl<P: Provider> Deadline<P> {
    pub fn new(inner: P, limit: Duration) -> Self {
        Self { inner, limit }
    }

    async fn around<T>(
        &self,
        operation: &'static str,
        id: Option<&str>,
        call: impl Future<Output = Result<T, ProviderError>> + Send,
    ) -> Result<T, ProviderError> {
        match tokio::time::timeout(self.limit, call).await {
            Ok(answer) => answer,
            Err(_) => {
                let operation = match operation {
                    "create" => Operation::Create,
                    "get" => Operation::Get,
                    "delete" => Operation::Delete,
                    _ => Operation::List,
                };
                let error = ProviderError::new(
                    ErrorClass::Transient,
                    self.inner.name(),
                    operation,
                    format!("no answer within {} s", self.limit.as_secs()),
                );
                Err(match id {
                    Some(id) => error.on(id),
                    None => error,
                })
            }
        }
    }
}

delegate!(Deadline);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance;
    use crate::fake::{Fault, World};
    use egress_core::InstallationId;
    use egress_core::spec::Placement;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    fn wrapped(world: &World, limits: Limits) -> (Arc<dyn Provider>, Metrics, Registry) {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let inner = world.provider("fake-a", &InstallationId::new("i"));
        (wrap(inner, limits, &metrics), metrics, registry)
    }

    fn text(registry: &Registry) -> String {
        let mut out = String::new();
        encode(&mut out, registry).unwrap();
        out
    }

    #[tokio::test(start_paused = true)]
    async fn calls_are_counted_by_result_and_forgotten_with_the_provider() {
        let world = World::default();
        let (provider, metrics, registry) = wrapped(&world, Limits::default());
        let request = conformance::request(1, &InstallationId::new("i"), Placement::default());
        let id = provider.create(&request).await.unwrap();
        provider.delete(&id).await.unwrap();
        provider.get(&id).await.unwrap_err();
        world.fail_next("fake-a", Operation::List, Fault::of(ErrorClass::Permanent));
        provider.list().await.unwrap_err();
        let shown = text(&registry);
        for line in [
            r#"egress_provider_requests_total{provider="fake-a",operation="create",result="success"} 1"#,
            r#"egress_provider_requests_total{provider="fake-a",operation="get",result="not_found"} 1"#,
            r#"egress_provider_requests_total{provider="fake-a",operation="list",result="permanent"} 1"#,
            r#"egress_provider_request_duration_seconds_count{provider="fake-a",operation="create"} 1"#,
            r#"egress_provider_requests_in_flight{provider="fake-a"} 0"#,
        ] {
            assert!(shown.contains(line), "{line} is not in\n{shown}");
        }
        metrics.forget("fake-a");
        assert!(!text(&registry).contains("fake-a"));
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_calls_at_a_time_than_the_limit_and_a_dropped_one_gives_its_turn_back() {
        let world = World::default();
        let limits = Limits {
            concurrency: 2,
            ..Limits::default()
        };
        let (provider, _, registry) = wrapped(&world, limits);
        world.slow_down("fake-a", Operation::List, Duration::from_secs(10));
        let started = Instant::now();
        let calls = (0..6).map(|_| provider.list());
        futures::future::join_all(calls).await;
        assert_eq!(started.elapsed().as_secs(), 30, "three rounds of two");
        let hung: Vec<_> = (0..4)
            .map(|_| {
                let provider = Arc::clone(&provider);
                tokio::spawn(async move { provider.list().await })
            })
            .collect();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let shown = text(&registry);
        assert!(shown.contains(r#"requests_in_flight{provider="fake-a"} 2"#));
        assert!(shown.contains(r#"requests_waiting{provider="fake-a"} 2"#));
        for call in hung {
            call.abort();
            let _ = call.await;
        }
        provider.list().await.unwrap();
        let shown = text(&registry);
        assert!(shown.contains(r#"requests_in_flight{provider="fake-a"} 0"#));
        assert!(shown.contains(r#"requests_waiting{provider="fake-a"} 0"#));
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_hangs_becomes_transient() {
        let world = World::default();
        let (provider, _, _) = wrapped(&world, Limits::default());
        world.slow_down("fake-a", Operation::Get, Duration::from_secs(1 << 30));
        let error = provider.get(&ProviderId::new("x")).await.unwrap_err();
        assert_eq!(error.class, ErrorClass::Transient);
        assert_eq!(error.to_string(), "fake-a: get x: no answer within 120 s");
    }

    /// `find` and `collect_garbage` reach a backend's own implementation, not the default.
    #[tokio::test(start_paused = true)]
    async fn overridden_calls_are_passed_on() {
        let world = World::default();
        let (provider, _, _) = wrapped(&world, Limits::default());
        world.add_stray(
            "fake-a",
            crate::fake::Stray {
                name: "volume-1".into(),
                uid: None,
                created_at: None,
            },
        );
        let deleted = provider
            .collect_garbage(&BTreeSet::new(), Duration::from_secs(60))
            .await
            .unwrap();
        assert_eq!(deleted, ["volume-1"]);
    }
}
