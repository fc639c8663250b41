declare module 'parse-prometheus-text-format' {
  function parse(text: string): parse.Family[];

  namespace parse {
    interface Family {
      name: string;
      help: string;
      type: string;
      metrics: { labels?: Record<string, string>; value?: string }[];
    }
  }

  export = parse;
}
