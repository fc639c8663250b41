import Joi from 'joi';
import { OUTPUT_NAME_MAX_LENGTH, OUTPUT_VALUE_MAX_BYTES, OUTPUTS_MAX } from '../domain.ts';
import type { Report } from '../store/reports.ts';
import { bodySchema, textSchema } from './input-schemas.ts';

/** How another system says that a deployment goes. */
export interface ReportBody {
  status: Report['status'];
  message?: string | null;
  outputs?: Record<string, string>;
}

const MESSAGE_MAX_LENGTH = 4096;

const OUTPUT_NAME = new RegExp(`^[A-Za-z_][A-Za-z0-9_]{0,${OUTPUT_NAME_MAX_LENGTH - 1}}$`);

/** The pattern in words. */
const OUTPUT_NAME_RULE = `a name is 1 to ${OUTPUT_NAME_MAX_LENGTH} letters a-z and A-Z, digits and underscores, no digit first`;

const outputValue = Joi.string()
  .allow('')
  .custom((value: string, helpers) =>
    Buffer.byteLength(value) <= OUTPUT_VALUE_MAX_BYTES
      ? value
      : helpers.error('any.invalid', { reason: `must be at most ${OUTPUT_VALUE_MAX_BYTES} bytes` }),
  );

const refusedOutput = Joi.any().custom((_value, helpers) =>
  helpers.error('any.invalid', { reason: `is not allowed: ${OUTPUT_NAME_RULE}` }),
);

/** The rules of a `ReportBody`. */
export const reportBody = bodySchema({
  status: Joi.string()
    .valid('running', 'succeeded', 'failed')
    .required()
    .description('`running` when the work begins, and how it ended.'),
  message: textSchema(MESSAGE_MAX_LENGTH)
    .allow(null, '')
    .description('If it is left out, null or empty, the message of an earlier report stays.'),
  outputs: Joi.object()
    .pattern(OUTPUT_NAME, outputValue)
    .pattern(Joi.any(), refusedOutput)
    .max(OUTPUTS_MAX)
    // joi would generate patternProperties, of which client generators make objects without any properties.
    .meta({
      jsonSchema: {
        type: 'object',
        // json.ts refuses `__proto__` as a name anywhere.
        propertyNames: { pattern: OUTPUT_NAME.source, not: { const: '__proto__' } },
        additionalProperties: { type: 'string', maxLength: OUTPUT_VALUE_MAX_BYTES },
        maxProperties: OUTPUTS_MAX,
      },
    })
    .description(
      `They replace all outputs of an earlier report; if they are left out, those stay. At most ${OUTPUTS_MAX}, each value with at most ${OUTPUT_VALUE_MAX_BYTES} bytes (not characters) in UTF-8; ${OUTPUT_NAME_RULE}.`,
    ),
}).example({ status: 'succeeded', outputs: { url: 'https://example.org' } });
